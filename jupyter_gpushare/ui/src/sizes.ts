/* eslint-disable */
// Written by jupyter_gpushare/ui/generate.py; do not edit.

/** `0.5`, `1/2` or `2` GPUs; the broker says what is too fine or too many. */
export const GPUS = /^((?=.*[1-9])([0-9]{1,4}|0{0,4}[.][0-9]{1,11}|1[.]0{1,11})|[1-9][0-9]{0,6}\/[1-9][0-9]{0,7})$/;

/** An amount of memory: 20GiB, 500MB or a number of bytes. */
export const MEMORY = /^(([0-9]{1,15})([kKMGT]|[KMGT]i)?B?)$/;

/** Bytes of the unit that every amount of memory is shown in. */
export const GIB = 1073741824;

/** Amounts below this many GiB have one digit after the point. */
export const TENTHS_BELOW = 9.95;
