/** Log of a job, read in pieces and bounded in size.  No widgets here. */

import { gapText, leftOutText } from './messages';

/** A piece of a job's log. */
export interface ILogPiece {
  readonly text: string;
  /** Offset of the piece in bytes; larger than requested if the log has a gap. */
  readonly offset: number;
  /** Offset of the next piece. */
  readonly next: number;
  /** Number of attempts, as far as the logs show. */
  readonly attempts: number;
  /** Oldest attempt with a stored log; 0 if there is none. */
  readonly first: number;
  /** Bytes that could not be written to disk while the job runs; 0 if none, or no longer known. */
  readonly leftOut: number;
  /** Why they could not be written. */
  readonly why: string;
}

/** Largest piece of a log (`LOG_BYTES` of the server); a full piece may lack up to 3 bytes of a character. */
const PIECE_BYTES = 256 * 1024;
/** Reading begins this many bytes before the end of a log. */
export const FIRST_BYTES = PIECE_BYTES;
const READ_EVERY_MS = 1000;
/** Pause between two full pieces, so that the page can draw the first. */
const DRAW_MS = 50;
const READ_AT_LEAST_EVERY_MS = 60_000;
const MAX_LINES = 10_000;
/** Maximum characters of all lines together. */
const MAX_CHARS = 4_000_000;
/** Maximum characters of a line that has not ended. */
const MAX_REST = 64 * 1024;
// eslint-disable-next-line no-control-regex
const COLOURS = /\x1b\[[0-9;?]*[ -/]*[@-~]/g;

/** Returns text as a terminal shows it: without colours, and without text that a `\\r` overwrote. */
function plain(text: string): string {
  const colourless = text.replace(COLOURS, '').replace(/\r+(?=\n|$)/g, '');
  return colourless.includes('\r') ? colourless.replace(/[^\n]*\r/g, '') : colourless;
}

/** Returns the visible part of an unfinished line, at most `MAX_REST` characters. */
function seen(rest: string): string {
  const colourless = rest.replace(COLOURS, '');
  // Text before a `\\r` stays visible until other text, not half of a colour code, overwrites it.
  // eslint-disable-next-line no-control-regex
  const overwritten = /^[^]*\r(?=[^\r\x1b])/.exec(colourless)?.[0].length ?? 0;
  return colourless.slice(Math.max(overwritten, colourless.length - MAX_REST));
}

/** Returns the last lines within `MAX_LINES` and `MAX_CHARS`. */
function lastOf(lines: readonly string[]): readonly string[] {
  const first = Math.max(0, lines.length - MAX_LINES);
  let from = lines.length;
  let remaining = MAX_CHARS;
  while (from > first && (remaining -= lines[from - 1]!.length) >= 0) {
    from--;
  }
  return lines.slice(from);
}

export class Log {
  constructor(
    private readonly _fetch: (attempt: number, offset: number) => Promise<ILogPiece>,
    /** 0 is the newest. */
    readonly attempt: number
  ) {}

  get lines(): readonly string[] {
    return this._lines;
  }

  /** Attempts that have a stored log; null while unknown. */
  get kept(): readonly number[] | null {
    return this._kept;
  }

  /** Whether the beginning is missing in `lines`; the log file may have it. */
  get isCut(): boolean {
    return this._isCut;
  }

  /** A sentence about bytes that could not be written to disk; empty if there are none. */
  get lack(): string {
    return this._lack;
  }

  /** Whether more can be read at once, because the last piece was full. */
  get isBehind(): boolean {
    return this._isBehind;
  }

  /** Reads the next piece; resolves to whether there was one.  Concurrent callers share one request. */
  readNext(): Promise<boolean> {
    this._reading ??= this._readNext().finally(() => {
      this._reading = null;
    });
    return this._reading;
  }

  private async _readNext(): Promise<boolean> {
    const piece = await this._fetch(this.attempt, this._next ?? -FIRST_BYTES);
    const { attempts, first } = piece;
    this._lack = piece.leftOut > 0 ? leftOutText(piece.leftOut, piece.why) : '';
    this._kept = attempts === 0 ? [] : Array.from({ length: attempts - first + 1 }, (_, n) => first + n);
    if (piece.attempts !== this._attempts && this.attempt === 0 && this._attempts > 0) {
      // A new attempt has begun, with a new log.
      this._attempts = piece.attempts;
      this._lines = [];
      this._rest = '';
      this._next = 0;
      this._isCut = false;
      this._isBehind = true;
      return true;
    }
    this._attempts = piece.attempts;
    this._isCut = this._isCut || (this._next === null && piece.offset > 0);
    const missing = this._next === null ? 0 : piece.offset - this._next;
    this._next = piece.next;
    this._isBehind = piece.next - piece.offset > PIECE_BYTES - 4;
    if (piece.text === '') {
      return false;
    }
    const gap = missing > 0 ? `\n${gapText(missing)}\n` : '';
    const all = (this._rest + gap + piece.text).split('\n');
    this._rest = all[all.length - 1] = seen(all[all.length - 1]!);
    const whole = this._lines.slice(0, Math.max(0, this._lines.length - 1));
    const lines = whole.concat(all.map(plain));
    this._lines = lastOf(lines);
    this._isCut ||= this._lines.length < lines.length || this._rest.length === MAX_REST;
    return true;
  }

  /** Returns the numbers of the lines that contain a text, in any case. */
  find(text: string): number[] {
    const query = text.toLowerCase();
    const found: number[] = [];
    if (query !== '') {
      this._lines.forEach((line, n) => {
        if (line.toLowerCase().includes(query)) {
          found.push(n);
        }
      });
    }
    return found;
  }

  private _lines: readonly string[] = [];
  private _rest = '';
  private _lack = '';
  private _reading: Promise<boolean> | null = null;
  private _next: number | null = null;
  private _attempts = 0;
  private _kept: readonly number[] | null = null;
  private _isCut = false;
  private _isBehind = false;
}

export interface IReading {
  /** Whether the log is visible. */
  readonly isSeen: () => boolean;
  /** Whether the job may still print. */
  readonly grows: boolean;
  /** Called after each read, with whether there was more text, and the refusal or ''. */
  readonly onRead: (isMore: boolean, refusal: string) => void;
}

/**
 * Reads a log to its end while it is visible: every second, every `DRAW_MS` while it is
 * behind, with back-off while reads fail.  Returns the function that stops reading.
 */
export function keepReading(log: Log, reading: IReading): () => void {
  let over = false;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let failures = 0;
  const read = async (): Promise<void> => {
    let more = false;
    let refusal = '';
    const seen = reading.isSeen();
    if (seen) {
      try {
        more = await log.readNext();
        failures = 0;
      } catch (error) {
        refusal = error instanceof Error ? error.message : String(error);
        failures++;
      }
      if (over) {
        return;
      }
      reading.onRead(more, refusal);
    }
    // The log of a job that does not run is read only up to its last line.
    if (more || refusal !== '' || !seen || reading.grows) {
      const pause =
        seen && failures === 0 && log.isBehind
          ? DRAW_MS
          : Math.min(READ_AT_LEAST_EVERY_MS, READ_EVERY_MS * 2 ** (seen ? failures : 0));
      timer = setTimeout(() => void read(), pause);
    }
  };
  void read();
  return () => {
    over = true;
    clearTimeout(timer);
  };
}
