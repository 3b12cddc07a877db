/* eslint-disable */
// Written by jupyter_gpushare/ui/generate.py; do not edit.

/** The most GPUs that one job may ask for. */
export const MOST_GPUS = 1024;

/** An amount of memory: 20GiB, 500MB or a number of bytes. */
export const MEMORY = /^([0-9]{1,15})([kKMGT]|[KMGT]i)?B?$/;
