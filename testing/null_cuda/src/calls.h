/* The common part of all calls into the null CUDA: initialisation, bad forks, injected faults. */
#pragma once
#include "books.h"

/* Counts a call, and returns the cudaError_t (or ncclResult_t) of an injected fault, or 0.
 * `bytes` is the total that this process would hold after a call that allocates. */
int call_enter(const char *name, uint64_t bytes);
/* The machine's number of a visible device; -1 if there is no such device. */
int call_physical(int device);
void call_uuid(int device, unsigned char *uuid);
int call_devices(void);
/* The device of this thread. */
int call_current(void);
int call_set_current(int device);
/* Whether this process has used CUDA, and whether it was forked from one that had. */
int call_is_initialized(void);
int call_is_bad_fork(void);
/* Makes this process's context on its current device, which needs memory; an error or 0. */
int call_make_context(void);
int call_has_context(int device);
/* Contents of small copies. The device computes nothing, but returns what was copied to it, unless
 * a kernel ran since, which might have changed it. */
enum { SMALL_BYTES = 1 << 16 };
void memory_write(const void *device, const void *host, size_t bytes);
/* Forgets all contents, because a kernel has run. */
void memory_forget(void);
/* Fills `host` with the content, else with zeros; returns whether there was any. */
int memory_read(void *host, const void *device, size_t bytes);
