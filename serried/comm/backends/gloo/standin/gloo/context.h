// Stand-in for gloo's context.h.
#pragma once
#include <gloo/types.h>
