/* The two files of a lease, as a process of it finds and maps them: below the folder that
 * GPUSHARE_LEASE_DIR named when the process started. */
#ifndef GPUSHARE_LEASE_FILES_H
#define GPUSHARE_LEASE_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

/* Keeps the folder; whether the variable is set at all.  Called once, before all of the others. */
bool keep_lease_folder(void);

/* Says once on stderr why GPU memory cannot be allocated. */
void complain_of_lease(const char *what, const char *why);

/* Whether there is a regular file of at least so many bytes; `file` is what stat(2) says of it. */
bool find_lease_file(const char *name, size_t bytes, struct stat *file);

/* Maps it for ever, and makes an account of a new one; NULL, with a complaint, where that fails.
 * `may_be_missing`: without one where there is no such file. */
void *map_lease_file(const char *name, bool write, size_t bytes, bool may_be_missing, struct stat *file);

#endif
