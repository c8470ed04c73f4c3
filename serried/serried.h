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
#include "serried/mesh/mesh.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/sync_batchnorm.h"
#include "serried/tensor/born_sharded.h"
#include "serried/tensor/comm_debug.h"
#include "serried/tensor/coverage.h"
#include "serried/tensor/dispatch.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/explain.h"
#include "serried/tensor/factories.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/local_map.h"
#include "serried/tensor/modules.h"
#include "serried/tensor/random.h"
#include "serried/tensor/visualize.h"

#include <torch/torch.h>
