// See gloo/algorithm.h: nothing of this header is needed.
#pragma once
