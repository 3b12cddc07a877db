/* Holds a mutex until the end of the block. */
#ifndef GPUSHARE_HOLD_H
#define GPUSHARE_HOLD_H

#include <pthread.h>

static inline void release_mutex(pthread_mutex_t **mutex)
{
    pthread_mutex_unlock(*mutex);
}

#define HELD __attribute__((cleanup(release_mutex))) pthread_mutex_t
#define HOLD(mutex) HELD *held_ = (pthread_mutex_lock(mutex), mutex)

#endif
