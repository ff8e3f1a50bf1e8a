"""Notices parameters that a module gets after it was wrapped, at no cost for steps in which nothing was added."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch.nn.modules import module as torch_module

_counter = itertools.count(1)
_registrations = 0  # parameters and submodules registered anywhere since the first model was wrapped
_watching = False

#: Who wraps a module: by the module, as long as both live.
_wrappers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[torch.nn.Module]] = weakref.WeakKeyDictionary()


def _note(*_: Any) -> None:
    global _registrations
    _registrations = next(_counter)


def watch_registrations() -> None:
    """Count registrations in this process from now on."""
    global _watching
    if _watching:
        return
    _watching = True
    torch_module.register_module_parameter_registration_hook(_note)
    torch_module.register_module_module_registration_hook(_note)


def registrations() -> int:
    """A number that changes whenever a module gets a parameter or a submodule."""
    return _registrations


def wrapper_of(module: torch.nn.Module) -> torch.nn.Module | None:
    """The living wrapper made last around ``module``, if there is one."""
    reference = _wrappers.get(module)
    return None if reference is None else reference()


def note_wrapper(module: torch.nn.Module, wrapper: torch.nn.Module) -> None:
    """Remember who wraps ``module``."""
    _wrappers[module] = weakref.ref(wrapper)
