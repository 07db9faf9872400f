#define _GNU_SOURCE
#include "books.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static struct books *books;
static int descriptor = -1;
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;

/* Reopen the file: a child shares its parent's file description, and so its parent's lock. */
static void in_child(void) {
    pthread_mutex_init(&threads, NULL);
    if (descriptor >= 0) {
        close(descriptor);
        descriptor = open(getenv("NULL_CUDA_BOOKS"), O_RDWR | O_CLOEXEC);
    }
}

struct books *books_open(void) {
    if (books) return books;
    const char *path = getenv("NULL_CUDA_BOOKS");
    if (!path) return NULL;
    descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        dprintf(2, "null CUDA: NULL_CUDA_BOOKS=%s cannot be opened\n", path);
        return NULL;
    }
    void *at = mmap(NULL, sizeof *books, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (at == MAP_FAILED) return NULL;
    books = at;
    pthread_atfork(NULL, NULL, in_child);
    return books;
}

void books_lock(void) {
    pthread_mutex_lock(&threads);
    while (flock(descriptor, LOCK_EX) && errno == EINTR) {}
}

void books_unlock(void) {
    flock(descriptor, LOCK_UN);
    pthread_mutex_unlock(&threads);
}

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

static int has_ended(int64_t pid) {
    if (kill((pid_t)pid, 0) && errno == ESRCH) return 1;
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    FILE *file = fopen(path, "re");
    if (!file) return 1;
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
    char *end = NULL;
    for (char *c = line; *c; c++) if (*c == ')') end = c;
    return end && end[1] && (end[2] == 'Z' || end[2] == 'X');
}

/* Free the memory of ended processes, some time after their end, as a driver does. */
static void sweep(struct books *b) {
    for (int i = 0; i < MAX_ENTRIES; i++) {
        struct entry *entry = &b->entry[i];
        if (!entry->pid || !has_ended(entry->pid)) continue;
        if (!entry->gone_at_ms) entry->gone_at_ms = now_ms();
        if (now_ms() - entry->gone_at_ms >= b->reclaim_ms) *entry = (struct entry){0};
    }
}

uint64_t books_used(struct books *b, int device) {
    sweep(b);
    uint64_t used = b->device[device].busy_bytes;
    for (int i = 0; i < MAX_ENTRIES; i++)
        if (b->entry[i].pid && b->entry[i].device == device) used += b->entry[i].bytes;
    return used;
}

static struct entry *mine(struct books *b, int device) {
    struct entry *unused = NULL;
    for (int i = 0; i < MAX_ENTRIES; i++) {
        struct entry *entry = &b->entry[i];
        if (entry->pid == getpid() && entry->device == device) return entry;
        if (!entry->pid && !unused) unused = entry;
    }
    if (unused) *unused = (struct entry){.pid = getpid(), .device = device};
    return unused;
}

int books_take(int device, uint64_t bytes) {
    struct books *b = books_open();
    books_lock();
    int fits = books_used(b, device) + bytes <= b->device[device].total_bytes;
    struct entry *entry = fits ? mine(b, device) : NULL;
    if (entry) entry->bytes += bytes;
    books_unlock();
    return entry != NULL;
}

void books_give(int device, uint64_t bytes) {
    struct books *b = books_open();
    books_lock();
    struct entry *entry = mine(b, device);
    if (entry) entry->bytes -= bytes < entry->bytes ? bytes : entry->bytes;
    books_unlock();
}
