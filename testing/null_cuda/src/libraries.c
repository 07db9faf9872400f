/* cuBLAS and cuDNN: functions that return handles or values. testing/null_cuda/build.py generates
 * all others that libtorch needs; they do nothing. */
#include "calls.h"

#include <cudnn_version.h>
#include <stdio.h>
#include <string.h>

#define ENTER() do { int e_ = call_enter(__func__, 0); if (e_) return e_; } while (0)
static char handle[4096];

int cublasCreate_v2(void **h) { ENTER(); *h = handle; return 0; }
int cublasLtCreate(void **h) { ENTER(); *h = handle; return 0; }
int cublasGetMathMode(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *mode) { *mode = 0; return 0; }
int cublasGetStream_v2(void *h, void **stream) { *stream = NULL; return 0; }
int cublasGetVersion_v2(void *h, int *version) { *version = 130400; return 0; }
size_t cublasLtGetVersion(void) { return 130400; }
size_t cublasLtGetCudartVersion(void) { return 13020; }
const char *cublasGetStatusString(int status) { return status == 3 ? "the resource allocation failed" : "a failure"; }
const char *cublasLtGetStatusString(int status) { return cublasGetStatusString(status); }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *count) {
    ENTER();
    memset(results, 0, 96); /* cublasLtMatmulHeuristicResult_t: no workspace */
    *count = 1;
    return 0;
}

int cudnnCreate(void **h) { ENTER(); *h = handle; return 0; }
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion(void) { return 13020; }
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_SUCCESS"; }
void cudnnGetLastErrorString(char *text, size_t bytes) { snprintf(text, bytes, "an injected failure"); }

/* One algorithm for every convolution, without a workspace. A result has at most 48 bytes
 * (cudnnConvolutionFwdAlgoPerf_t and similar types); torch reads the first. */
enum { RESULT_BYTES = 48 };
#define ALGORITHMS(direction)                                                                      \
    int cudnnGetConvolution##direction##Algorithm_v7(void *h, void *a, void *b, void *c, void *d,  \
                                                     int wanted, int *count, void *found) {        \
        ENTER();                                                                                   \
        memset(found, 0, RESULT_BYTES);                                                            \
        *count = 1;                                                                                \
        return 0;                                                                                  \
    }                                                                                              \
    int cudnnFindConvolution##direction##AlgorithmEx(                                              \
        void *h, void *a, void *b, void *c, void *d, void *e, void *f, void *g, int wanted,        \
        int *count, void *found, void *workspace, size_t bytes) {                                  \
        ENTER();                                                                                   \
        memset(found, 0, RESULT_BYTES);                                                            \
        *count = 1;                                                                                \
        return 0;                                                                                  \
    }                                                                                              \
    int cudnnGetConvolution##direction##WorkspaceSize(void *h, void *a, void *b, void *c, void *d, \
                                                      int algorithm, size_t *bytes) {              \
        ENTER();                                                                                   \
        *bytes = 0;                                                                                \
        return 0;                                                                                  \
    }
ALGORITHMS(Forward)
ALGORITHMS(BackwardData)
ALGORITHMS(BackwardFilter)

#define NO_WORKSPACE(name, ...)                                                                    \
    int name(__VA_ARGS__, size_t *bytes) {                                                         \
        *bytes = 0;                                                                                \
        return 0;                                                                                  \
    }
NO_WORKSPACE(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, void *h, int mode, int ops,
             void *x, void *z, void *y, void *scale, void *activation)
NO_WORKSPACE(cudnnGetBatchNormalizationBackwardExWorkspaceSize, void *h, int mode, int ops, void *x,
             void *y, void *dy, void *dz, void *dx, void *scale, void *activation)
NO_WORKSPACE(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, void *h, int mode, int ops,
             void *activation, void *x)
NO_WORKSPACE(cudnnDropoutGetStatesSize, void *h)
