// Stand-in for gloo's transport/device.h.
#pragma once
#include <gloo/types.h>
