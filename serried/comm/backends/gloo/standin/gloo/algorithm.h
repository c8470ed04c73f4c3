// Stand-in for gloo's algorithm.h.
#pragma once
#include <gloo/types.h>
