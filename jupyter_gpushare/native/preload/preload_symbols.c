/* Finds a definition in the loaded objects without the loader: for musl's dlsym, and for functions of CUPTI,
 * which a framework may load in a local scope (RTLD_LOCAL).
 *
 * musl (Alpine) ends a program whose preloaded library needs a symbol that musl lacks ("symbol not
 * found", exit 127; measured with musl 1.2.3, tests/native/test_musl.py).  It lacks dlvsym and
 * __register_atfork, so they are weak (old_glibc.h, preload.c).  The account is not used under musl:
 * its pthread_mutex_t has another layout than glibc's, and one lease may have processes of both.
 * NVIDIA's driver is built only for glibc.
 */
#define _GNU_SOURCE
#include "../old_glibc.h"

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "preload_symbols.h"

struct search {
    const char *name;
    void *found;
};

/* Whether an object is this library. */
static bool is_own(const struct dl_phdr_info *object)
{
    static const char here;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_LOAD &&
            (ElfW(Addr))&here - (object->dlpi_addr + object->dlpi_phdr[i].p_vaddr) < object->dlpi_phdr[i].p_memsz)
            return true;
    return false;
}

/* Returns an address from a dynamic section; glibc has already added the base to it, musl has not. */
static const void *at(const struct dl_phdr_info *object, ElfW(Addr) value)
{
    return (const void *)(value < object->dlpi_addr ? object->dlpi_addr + value : value);
}

/* Returns the number of symbols in a table that has only DT_GNU_HASH: the end of its last chain. */
static uint32_t gnu_hash_count(const uint32_t *table)
{
    uint32_t buckets = table[0], first = table[1], bloom_words = table[2], last = 0;
    const uint32_t *bucket = table + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof *table), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        last = bucket[i] > last ? bucket[i] : last;
    while (last >= first && !(chain[last - first] & 1))
        last++;
    return last < first ? first : last + 1;
}

static int search_object(struct dl_phdr_info *object, size_t size, void *data)
{
    struct search *search = data;
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *hash = NULL, *gnu_hash = NULL;
    (void)size;
    if (is_own(object))
        return 0;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == DT_SYMTAB)
            symbols = at(object, dynamic->d_un.d_ptr);
        else if (dynamic->d_tag == DT_STRTAB)
            names = at(object, dynamic->d_un.d_ptr);
        else if (dynamic->d_tag == DT_HASH)
            hash = at(object, dynamic->d_un.d_ptr);
        else if (dynamic->d_tag == DT_GNU_HASH)
            gnu_hash = at(object, dynamic->d_un.d_ptr);
    }
    uint32_t count = hash ? hash[1] : gnu_hash ? gnu_hash_count(gnu_hash) : 0;
    for (uint32_t i = 0; symbols && names && i < count; i++) {
        if (symbols[i].st_shndx == SHN_UNDEF || strcmp(names + symbols[i].st_name, search->name))
            continue;
        search->found = (void *)(object->dlpi_addr + symbols[i].st_value);
        return 1;
    }
    return 0;
}

void *search_symbol(const char *name)
{
    struct search search = {name, NULL};
    dl_iterate_phdr(search_object, &search);
    return search.found;
}
