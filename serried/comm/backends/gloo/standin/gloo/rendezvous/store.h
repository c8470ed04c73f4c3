// Stand-in for gloo's rendezvous/store.h.
#pragma once
#include <gloo/types.h>
