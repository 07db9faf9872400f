/* What every call into the null CUDA has in common: initialisation, bad forks, injected faults. */
#pragma once
#include "books.h"

/* Counts a call, and returns the cudaError_t (or ncclResult_t) that it must end with: 0 to go on.
 * `bytes` is what a call that allocates would make this process hold in all. */
int call_enter(const char *name, uint64_t bytes);
/* The machine's number of a device of this process; -1 if there is none such. */
int call_physical(int device);
void call_uuid(int device, unsigned char *uuid);
int call_devices(void);
/* The device of this thread. */
int call_current(void);
int call_set_current(int device);
/* Whether this process has used CUDA, and whether it was forked from one that had. */
int call_is_initialized(void);
int call_is_bad_fork(void);
/* Makes this process' context on its current device, which takes memory; an error or 0. */
int call_make_context(void);
int call_has_context(int device);
/* Contents of small copies: the device computes nothing, but hands back what was copied to it, if
 * no kernel ran since: it might have written to the same place. */
enum { SMALL_BYTES = 1 << 16 };
void memory_write(const void *device, const void *host, size_t bytes);
/* Fills `host`, with zeros where nothing was copied to; whether anything was. */
void memory_forget(void);
int memory_read(void *host, const void *device, size_t bytes);
