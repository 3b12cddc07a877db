/* How a process finds and maps the two files of its lease, in the folder that GPUSHARE_LEASE_DIR named
 * when the process started. */
#ifndef GPUSHARE_LEASE_FILES_H
#define GPUSHARE_LEASE_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

/* Stores the folder; returns whether the variable is set.  Called once, before the other functions. */
bool keep_lease_folder(void);

/* Prints once on stderr why GPU memory cannot be allocated. */
void complain_of_lease(const char *what, const char *why);

/* Whether there is a regular file of at least this many bytes; `file` gets its stat(2) data. */
bool find_lease_file(const char *name, size_t bytes, struct stat *file);

/* Maps a file for ever, and initializes a new account.  Returns NULL after a complaint on failure; there is
 * no complaint about a missing file with `may_be_missing`. */
void *map_lease_file(const char *name, bool write, size_t bytes, bool may_be_missing, struct stat *file);

#endif
