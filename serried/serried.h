// serried: distributed training for LibTorch. This header is the whole public API.
#pragma once

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/base/trace.h"
#include "serried/comm/collectives.h"
#include "serried/comm/group.h"
#include "serried/comm/ranks.h"
#include "serried/comm/rendezvous.h"
#include "serried/comm/watch.h"

#include <torch/torch.h>
