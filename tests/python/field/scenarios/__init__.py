"""The cases, a file or two for each kind. Importing this registers them."""

from field.scenarios import (  # noqa: F401
    a_absent,
    a_outputs,
    b_checkpointing,
    c_no_sync,
    d_views,
    e_buffers,
    e_changes,
    e_parameters,
    f_autograd,
    f_calls,
    g_hooks,
    g_powersgd,
    h_processes,
    h_results,
)
