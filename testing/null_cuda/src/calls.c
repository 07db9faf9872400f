#define _GNU_SOURCE
#include "calls.h"

#include <execinfo.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <ctype.h>
#include <string.h>
#include <unistd.h>

enum { INITIALIZATION_ERROR = 3, NO_DEVICE = 100, OUT_OF_MEMORY = 2 };

static int initialized, bad_fork;
static int visible[MAX_DEVICES], num_visible, has_context[MAX_DEVICES];
static __thread int current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The rules of NULL_CUDA_FAULTS; see NullCuda.environment in testing/null_cuda/books.py. */
static struct fault {
    char call[64], what[16];
    uint64_t from, times;
    int by_bytes, device;
} faults[MAX_FAULTS];
static int num_faults = -1;
static uint64_t seen[MAX_FAULTS];

static void in_child(void) {
    bad_fork = initialized;
    pthread_mutex_init(&lock, NULL);
}

static void read_faults(void) {
    num_faults = 0;
    const char *given = getenv("NULL_CUDA_FAULTS");
    if (!given) return;
    char *text = strdup(given), *rest = text, *part;
    while ((part = strsep(&rest, ";")) && num_faults < MAX_FAULTS) {
        struct fault fault = {.device = -1, .times = UINT64_MAX};
        char *what = strchr(part, '=');
        if (!what) continue;
        *what++ = 0;
        snprintf(fault.what, sizeof fault.what, "%s", what);
        char *times = strchr(part, '*'), *device = strchr(part, '@');
        if (times) { *times = 0; fault.times = strtoull(times + 1, NULL, 10); }
        if (device) { *device = 0; fault.device = atoi(device + 1); }
        char *from = strpbrk(part, "#>");
        if (from) {
            fault.by_bytes = *from == '>';
            *from = 0;
            fault.from = strtoull(from + 1, NULL, 10);
        }
        snprintf(fault.call, sizeof fault.call, "%s", part);
        faults[num_faults++] = fault;
    }
    free(text);
}

static int injected(struct books *books, const char *name, uint64_t bytes) {
    for (int i = 0; i < num_faults; i++) {
        struct fault *fault = &faults[i];
        if (strcmp(fault->call, name)) continue;
        if (fault->device >= 0 && fault->device != call_physical(current)) continue;
        if (fault->by_bytes ? bytes <= fault->from : ++seen[i] < fault->from) continue;
        books_lock();
        int fires = books->fired[i]++ < fault->times;
        books_unlock();
        if (!fires) continue;
        dprintf(2, "null CUDA: %s ends with %s, as NULL_CUDA_FAULTS says\n", name, fault->what);
        if (!strcmp(fault->what, "abort")) abort();
        if (!strcmp(fault->what, "hang")) for (;;) pause();
        return atoi(fault->what);
    }
    return 0;
}

static int named(struct books *books, const char *word) {
    char *end;
    long index = strtol(word, &end, 10);
    if (end != word && !*end) return index >= 0 && index < (long)books->devices ? (int)index : -1;
    for (int i = 0; i < (int)books->devices; i++)
        if (*word && !strncmp(books->device[i].uuid, word, strlen(word))) return i;
    return -1;
}

/* Read CUDA_VISIBLE_DEVICES as the driver does: devices up to the first unknown one; MIG devices
 * only by name, and one of them at most. */
static void choose_devices(struct books *books) {
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    num_visible = 0;
    if (!given) {
        for (int i = 0; i < (int)books->devices; i++)
            if (strncmp(books->device[i].uuid, "MIG-", 4)) visible[num_visible++] = i;
        if (!num_visible && books->devices) visible[num_visible++] = 0;
        return;
    }
    char *text = strdup(given), *rest = text, *word;
    while ((word = strsep(&rest, ",")) && num_visible < MAX_DEVICES) {
        int device = named(books, word);
        if (device < 0) break;
        visible[num_visible++] = device;
        if (!strncmp(books->device[device].uuid, "MIG-", 4)) break;
    }
    free(text);
}

int call_is_initialized(void) { return initialized; }
int call_is_bad_fork(void) { return bad_fork; }
int call_devices(void) { return num_visible; }
int call_current(void) { return current; }

int call_physical(int device) {
    return device >= 0 && device < num_visible ? visible[device] : -1;
}

/* The 16 bytes that the hexadecimal digits after GPU- or MIG- give. */
void call_uuid(int device, unsigned char *uuid) {
    memset(uuid, 0, 16);
    int digits = 0;
    for (const char *c = books_open()->device[call_physical(device)].uuid + 4; *c && digits < 32; c++) {
        if (!isxdigit((unsigned char)*c)) continue;
        int value = *c <= '9' ? *c - '0' : (*c | 32) - 'a' + 10;
        uuid[digits / 2] |= value << (digits % 2 ? 0 : 4);
        digits++;
    }
}

/* The first use of a device makes a context on it; every use of a broken device fails. */
int call_make_context(void) {
    int device = call_physical(current);
    if (device < 0) return NO_DEVICE;
    int error = (int)books_open()->device[device].error;
    if (error) return error;
    pthread_mutex_lock(&lock);
    int fits = has_context[device] || books_take(device, books_open()->context_bytes);
    has_context[device] |= fits;
    pthread_mutex_unlock(&lock);
    return fits ? 0 : OUT_OF_MEMORY;
}
int call_has_context(int device) {
    int physical = call_physical(device);
    return physical >= 0 && has_context[physical];
}

int call_set_current(int device) {
    if (call_physical(device) < 0) return 101; /* cudaErrorInvalidDevice */
    current = device;
    return 0;
}

static void initialize(struct books *books, const char *name) {
    initialized = 1;
    pthread_atfork(NULL, NULL, in_child);
    choose_devices(books);
    read_faults();
    if (getenv("NULL_CUDA_LOG")) {
        dprintf(2, "null CUDA: process %d begins with %s\n", getpid(), name);
        void *frames[40];
        backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
    }
}

int call_enter(const char *name, uint64_t bytes) {
    struct books *books = books_open();
    if (!books) return NO_DEVICE;
    if (bad_fork) return INITIALIZATION_ERROR;
    pthread_mutex_lock(&lock);
    if (!initialized) initialize(books, name);
    pthread_mutex_unlock(&lock);
    return injected(books, name, bytes);
}

/* A hash table of a few thousand small copies, by address; a later copy replaces an earlier one. */
enum { PLACES = 1 << 12 };
static struct place { const void *device; size_t bytes; void *content; uint64_t kernels; } places[PLACES];
static uint64_t kernels;

void memory_forget(void) { __atomic_add_fetch(&kernels, 1, __ATOMIC_RELAXED); }

static struct place *place_of(const void *device) {
    return &places[(uintptr_t)device * 0x9E3779B97F4A7C15ull >> 52];
}

void memory_write(const void *device, const void *host, size_t bytes) {
    pthread_mutex_lock(&lock);
    struct place *place = place_of(device);
    free(place->content);
    *place = (struct place){0};
    if (host && bytes <= SMALL_BYTES) {
        *place = (struct place){device, bytes, malloc(bytes), kernels};
        memcpy(place->content, host, bytes);
    }
    pthread_mutex_unlock(&lock);
}

int memory_read(void *host, const void *device, size_t bytes) {
    memset(host, 0, bytes);
    pthread_mutex_lock(&lock);
    struct place *place = place_of(device);
    int found = place->content && place->device == device && place->kernels == kernels;
    if (found) memcpy(host, place->content, bytes < place->bytes ? bytes : place->bytes);
    pthread_mutex_unlock(&lock);
    return found;
}
