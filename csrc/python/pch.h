// Precompiled for the Python bindings. No file relies on it: each includes what it uses.
#pragma once

#include <torch/extension.h>

#include "pch.h"
