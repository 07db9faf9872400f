/* nccl.h includes the C++ header cuda_runtime.h, but needs only this part of it. */
#pragma once
#include <cuda_runtime_api.h>
