/* Binds the libraries to glibc 2.17 (RHEL 7, 2014), so that they load in older containers.
 *
 * A library of LD_PRELOAD that needs a newer version than the container's glibc stops every program
 * before main() ("version GLIBC_2.34 not found"); only a missing file is ignored.  glibc 2.34 moved
 * the functions of libdl and libpthread into libc under new versions and keeps the old versions
 * (sourceware.org/glibc, NEWS of 2.34).  This file selects the old ones, and build.py links the
 * libraries from before 2.34.  stat and sscanf have new versions too (2.33, 2.38) and are not used.
 * tests/native/test_glibc.py checks the built libraries.
 *
 * The C files of the preload library and of the simulated driver include this file, so that a wheel with both
 * has the tag manylinux2014.  It binds nothing with sanitizers, which replace some of these functions.
 */
#ifndef GPUSHARE_OLD_GLIBC_H
#define GPUSHARE_OLD_GLIBC_H

#if defined __x86_64__
#define GPUSHARE_OLDEST "GLIBC_2.2.5"
#define GPUSHARE_ROBUST "GLIBC_2.12"
#elif defined __aarch64__
#define GPUSHARE_OLDEST "GLIBC_2.17"
#define GPUSHARE_ROBUST "GLIBC_2.17"
#endif

#pragma weak dlvsym /* musl lacks it (preload_symbols.c) */

#ifndef GPUSHARE_DLSYM
#define GPUSHARE_BIND(name, version) __asm__(".symver " #name ", " #name "@" version)
GPUSHARE_BIND(dlopen, GPUSHARE_OLDEST);
GPUSHARE_BIND(dlclose, GPUSHARE_OLDEST);
GPUSHARE_BIND(dladdr, GPUSHARE_OLDEST);
GPUSHARE_BIND(dlvsym, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_create, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_detach, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_sigmask, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_mutexattr_init, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_mutexattr_destroy, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_mutexattr_setpshared, GPUSHARE_OLDEST);
GPUSHARE_BIND(pthread_mutexattr_setrobust, GPUSHARE_ROBUST);
GPUSHARE_BIND(pthread_mutex_consistent, GPUSHARE_ROBUST);
#endif

extern const char *gnu_get_libc_version(void) __attribute__((weak));

/* False under musl (preload_symbols.c). */
static inline int is_glibc(void)
{
    return gnu_get_libc_version != 0;
}

#endif
