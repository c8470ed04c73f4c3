// What a hook may ask of the running backward; parameters that are DTensors ask it too.
#pragma once

#include "serried/tensor/making/backward_end.h"
