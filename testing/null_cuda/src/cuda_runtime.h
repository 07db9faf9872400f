/* nccl.h wants the C++ header, of which it needs only this. */
#pragma once
#include <cuda_runtime_api.h>
