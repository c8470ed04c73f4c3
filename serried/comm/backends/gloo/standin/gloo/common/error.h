// Stand-in for gloo's common/error.h.
#pragma once
#include <gloo/types.h>
