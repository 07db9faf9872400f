/* NCCL: the ranks of a communicator meet in a file. A collective waits for all ranks, as a device's
 * stream would. It moves the contents of small buffers only. */
#define _GNU_SOURCE
#include "calls.h"

#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 16 };

struct meeting {
    _Atomic uint32_t arrived, generation;
    uint8_t filled[MAX_RANKS];
    uint8_t content[MAX_RANKS][SMALL_BYTES];
};
struct ncclComm {
    int ranks, rank, splits;
    char path[512];
    _Atomic int aborted;
    struct meeting *meeting;
};

static __thread int group_depth;

static int meet(ncclComm_t comm) {
    struct meeting *m = comm->meeting;
    uint32_t generation = atomic_load(&m->generation);
    if (atomic_fetch_add(&m->arrived, 1) + 1 == (uint32_t)comm->ranks) {
        atomic_store(&m->arrived, 0);
        atomic_fetch_add(&m->generation, 1);
        return 0;
    }
    struct timespec pause_ = {0, 50000};
    while (atomic_load(&m->generation) == generation) {
        if (comm->aborted) return ncclSystemError;
        nanosleep(&pause_, NULL);
        if (pause_.tv_nsec < 5000000) pause_.tv_nsec *= 2;
    }
    return 0;
}

static ncclResult_t join(ncclComm_t *result, int ranks, int rank, const char *name) {
    if (ranks > MAX_RANKS) return ncclInvalidArgument;
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->ranks = ranks;
    comm->rank = rank;
    snprintf(comm->path, sizeof comm->path, "%s.%s", getenv("NULL_CUDA_BOOKS"), name);
    int file = open(comm->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *comm->meeting)) return ncclSystemError;
    comm->meeting = mmap(NULL, sizeof *comm->meeting, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    *result = comm;
    int error = meet(comm);
    unlink(comm->path);
    return error;
}

/* -- communicators */

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t error) {
    switch (error) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "internal error";
    }
}
const char *ncclGetLastError(ncclComm_t comm) { return getenv("NULL_NCCL_LAST_ERROR") ?: ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    int file = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    ssize_t got = read(file, id->internal, 8);
    close(file);
    return got == 8 ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    int error = call_enter("ncclCommInitRank", 0);
    if (error) return error;
    char name[32] = "";
    for (int i = 0; i < 8; i++) sprintf(name + 2 * i, "%02x", (unsigned char)id.internal[i]);
    return join(comm, ranks, rank, name);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    return ncclCommInitRank(comm, ranks, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) {
    return ncclCommInitRank(comm, ranks, id[0], rank);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
    int error = call_enter("ncclCommSplit", 0);
    if (error) return error;
    struct { int color, key; } *all = (void *)comm->meeting->content[0];
    comm->splits++;
    memcpy(comm->meeting->content[comm->rank], &(int[2]){color, key}, 2 * sizeof(int));
    if ((error = meet(comm))) return error;
    int ranks = 0, rank = 0;
    for (int other = 0; other < comm->ranks; other++) {
        all = (void *)comm->meeting->content[other];
        if (all->color != color) continue;
        ranks++;
        rank += all->key < key || (all->key == key && other < comm->rank);
    }
    if ((error = meet(comm))) return error;
    *part = NULL;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    char name[600];
    snprintf(name, sizeof name, "%s-%d-%d", strrchr(comm->path, '.') + 1, comm->splits, color);
    return join(part, ranks, rank, name);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { comm->aborted = 1; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommCount(ncclComm_t comm, int *ranks) { *ranks = comm->ranks; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device) { *device = call_current(); return ncclSuccess; }
ncclResult_t ncclGroupStart(void) { group_depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) { group_depth--; return ncclSuccess; }

/* -- collectives */

static size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 1;
    }
}

#define COMBINE(type)                                                                              \
    for (size_t i = 0; i < count; i++) {                                                           \
        type *a = (type *)into + i, b = ((const type *)other)[i];                                  \
        *a = op == ncclMax ? (b > *a ? b : *a) : op == ncclMin ? (b < *a ? b : *a)                 \
             : op == ncclProd ? *a * b : *a + b;                                                   \
    }
static void combine(void *into, const void *other, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclFloat32: COMBINE(float) break;
    case ncclFloat64: COMBINE(double) break;
    case ncclInt32: COMBINE(int32_t) break;
    case ncclInt64: COMBINE(int64_t) break;
    case ncclInt8: COMBINE(int8_t) break;
    case ncclUint8: COMBINE(uint8_t) break;
    default: break; /* 16-bit floats: the result stays that of rank 0 */
    }
}
static void divide(void *values, size_t count, ncclDataType_t type, int by) {
    for (size_t i = 0; i < count; i++) {
        if (type == ncclFloat32) ((float *)values)[i] /= by;
        if (type == ncclFloat64) ((double *)values)[i] /= by;
    }
}

/* Waits for all ranks. If `bytes` is small, the meeting then holds the contents of all ranks; a
 * buffer without known content counts as zeros. */
static int exchange(const char *name, ncclComm_t comm, const void *from, size_t bytes) {
    int error = call_enter(name, 0);
    if (error) return error;
    if (bytes <= SMALL_BYTES) {
        uint8_t *place = comm->meeting->content[comm->rank];
        comm->meeting->filled[comm->rank] = memory_read(place, from, bytes);
    }
    return meet(comm);
}
static int any_filled(ncclComm_t comm) {
    for (int rank = 0; rank < comm->ranks; rank++) if (comm->meeting->filled[rank]) return 1;
    return 0;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * size_of(type);
    int error = exchange("ncclAllReduce", comm, from, bytes);
    if (error || bytes > SMALL_BYTES) return error;
    if (any_filled(comm)) {
        char *result = malloc(bytes);
        memcpy(result, comm->meeting->content[0], bytes);
        for (int rank = 1; rank < comm->ranks; rank++)
            combine(result, comm->meeting->content[rank], count, type, op);
        if (op == ncclAvg) divide(result, count, type, comm->ranks);
        memory_write(to, result, bytes);
        free(result);
    }
    return meet(comm);
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclAllReduce(from, to, count, type, op, comm, stream);
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * size_of(type);
    int error = exchange("ncclBroadcast", comm, from, bytes);
    if (error || bytes > SMALL_BYTES) return error;
    if (comm->meeting->filled[root]) memory_write(to, comm->meeting->content[root], bytes);
    return meet(comm);
}
ncclResult_t ncclBcast(void *at, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(at, at, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * size_of(type);
    int error = exchange("ncclAllGather", comm, from, bytes);
    if (error || bytes > SMALL_BYTES) return error;
    if (any_filled(comm) && bytes * comm->ranks <= SMALL_BYTES) {
        char *result = malloc(bytes * comm->ranks);
        for (int rank = 0; rank < comm->ranks; rank++) {
            memcpy(result + rank * bytes, comm->meeting->content[rank], bytes);
            if (rank) memory_write((char *)to + rank * bytes, result + rank * bytes, bytes);
        }
        memory_write(to, result, bytes * comm->ranks); /* for reads of part 0, too */
        free(result);
    }
    return meet(comm);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return exchange("ncclReduceScatter", comm, from, SIZE_MAX);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return exchange("ncclAlltoAll", comm, from, SIZE_MAX);
}
