/* An NVTX tool in the place of Nsight: writes every range to the file that NVTX_LOG names.
 *
 * NVTX loads the library that NVTX_INJECTION64_PATH names and gives it tables of callbacks to fill.
 * Types and numbers are those of NVTX 3's public headers.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef struct {
    size_t size;
    int (*functions)(int module, Function ***table, unsigned *count);
} Callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message; /* of a registered string: its handle, here the string itself */
} Attributes;

enum { CALLBACKS = 1, CORE2 = 5, START = 2, END = 3, PUSH = 4, POP = 5, REGISTER = 10, DOMAIN = 12 };

static FILE *out;
static uint64_t ranges;

static void note(const char *what, const void *domain, const char *name, uint64_t id) {
    fprintf(out, "%s %ld %s %s %llu\n", what, syscall(SYS_gettid), (const char *)domain, name,
            (unsigned long long)id);
    fflush(out);
}
static void *create_domain(const char *name) { return strdup(name); }
static void *register_string(void *domain, const char *text) { (void)domain; return strdup(text); }
static int push(void *domain, const Attributes *a) { note("push", domain, a->message, 0); return 0; }
static int pop(void *domain) { note("pop", domain, "-", 0); return 0; }
static uint64_t start(void *domain, const Attributes *a) {
    uint64_t id = __atomic_add_fetch(&ranges, 1, __ATOMIC_SEQ_CST);
    note("start", domain, a->message, id);
    return id;
}
static void end(void *domain, uint64_t id) { note("end", domain, "-", id); }

int InitializeInjectionNvtx2(const void *(*table)(uint32_t)) {
    const Callbacks *callbacks = table(CALLBACKS);
    Function **core;
    unsigned count;
    out = fopen(getenv("NVTX_LOG"), "w");
    if (!out || !callbacks || !callbacks->functions(CORE2, &core, &count) || count <= DOMAIN) return 0;
    *core[DOMAIN] = (Function)create_domain;
    *core[REGISTER] = (Function)register_string;
    *core[PUSH] = (Function)push;
    *core[POP] = (Function)pop;
    *core[START] = (Function)start;
    *core[END] = (Function)end;
    return 1;
}
