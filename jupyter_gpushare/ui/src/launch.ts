/** Model of the dialog "Run as training job": fields, validation, request.  No widgets here. */

import { ISignal, Signal } from '@lumino/signaling';

import { GPUS, MEMORY } from './sizes';
import { durationOf, lines, nonEmpty, pairsOf, secondsOf } from './typed';
import { CheckpointMode, IJob, IJobChange, ILaunchForm, ILaunchRequest, IOffers, IOffersQuery } from './wire';
import { trans } from './translate';

/** The fields as typed. */
export interface IFields {
  readonly path: string;
  readonly command: string;
  readonly arguments: string;
  /** `name = value` lines. */
  readonly parameters: string;
  readonly kernel: string;
  readonly cwd: string;
  /** `NAME=VALUE` or `NAME` lines. */
  readonly variables: string;
  readonly size: 'gpus' | 'memory' | 'profile';
  readonly gpus: string;
  readonly memory: string;
  /** MIG profile; no form field, set only when a job is duplicated. */
  readonly profile: string;
  readonly project: string;
  readonly name: string;
  /** The job may start on GPUs that others own. */
  readonly borrow: boolean;
  /** A suspended job may resume on other GPUs. */
  readonly move: boolean;
  /** The job may share its GPU with another job; shown if the site allows it. */
  readonly share: boolean;
  readonly checkpoint: CheckpointMode;
  /** Notify the user when the job ends or is paused. */
  readonly notify: boolean;
  /** A webhook that the job's server calls; or empty. */
  readonly notifyUrl: string;
  readonly retries: string;
  /** A duration such as `4 h`; or empty. */
  readonly maxRun: string;
  /** Priority within the project; no field in the dialog of a new job, set only by a duplicate. */
  readonly priority: string;
  /** Seconds between SIGTERM and SIGKILL; null is the site's default.  No form field either. */
  readonly grace: number | null;
}

/** The names of the fields with one type. */
export type FieldOf<T> = {
  [field in keyof IFields]: IFields[field] extends T ? field : never;
}[keyof IFields];

export type Problems = { readonly [field in keyof IFields]?: string };

export const BLANK: IFields = {
  path: '',
  command: '',
  arguments: '',
  parameters: '',
  kernel: '',
  cwd: '',
  variables: '',
  size: 'gpus',
  gpus: '1',
  memory: '',
  profile: '',
  project: '',
  name: '',
  borrow: true,
  move: true,
  share: false,
  checkpoint: 'suspend',
  notify: true,
  notifyUrl: '',
  retries: '0',
  maxRun: '',
  priority: '0',
  grace: null
};

/** Time between the last change of a field and the request for the outlook. */
const ASK_AFTER_MS = 300;
/** Refresh interval of the outlook while the dialog is visible. */
const ASK_AGAIN_MS = 10_000;

/** Returns the fields of a duplicate of `job`. */
export function fieldsOf(job: IJob): Partial<IFields> {
  const source = job.source;
  return {
    path: source?.path ?? '',
    command: source === null ? job.command.map(quoted).join(' ') : '',
    arguments: source?.arguments ?? '',
    parameters: source === null ? '' : lines(source.parameters),
    kernel: source?.kernel ?? '',
    cwd: job.cwd ?? '',
    variables: chosenVariables(job).join('\n'),
    size: job.profile !== null ? 'profile' : job.memory !== null ? 'memory' : 'gpus',
    gpus: job.gpus,
    memory: job.memory ?? '',
    profile: job.profile ?? '',
    project: job.project,
    name: job.name,
    borrow: job.borrow,
    move: job.move,
    share: job.share,
    checkpoint: job.checkpoint,
    notify: job.notify,
    notifyUrl: job.notify_url,
    retries: String(job.retries),
    maxRun: durationOf(job.max_run_s),
    priority: String(job.priority),
    grace: job.grace_s
  };
}

/** Returns the variables that the owner chose, without the one that this page sets for every job. */
export function chosenVariables(job: IJob): string[] {
  return job.variables.filter(name => name !== 'PYTHONUNBUFFERED');
}

function quoted(word: string): string {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replace(/'/g, `'"'"'`)}'`;
}

/** Returns the variables without a value; the server fills in its own values. */
export function takenFromServer(fields: IFields): string[] {
  return nonEmpty(fields.variables).filter(line => !line.includes('='));
}

/** Returns an error message for each invalid field. */
export function problemsOf(fields: IFields): Problems {
  const problems: { -readonly [field in keyof IFields]?: string } = {};
  if (fields.path === '' && fields.command.trim() === '') {
    problems.command = trans.__('Name a file, or write a command.');
  }
  if (isNotebook(fields.path) && pairsOf(fields.parameters) === null) {
    problems.parameters = trans.__('One parameter a line, like: lr = 0.1');
  }
  if (nonEmpty(fields.variables).some(line => !/^[A-Za-z_]\w*(=.*)?$/.test(line))) {
    problems.variables = trans.__('One variable a line, like: SEED=1, or SEED to take it from this server');
  }
  if (fields.cwd !== '' && !fields.cwd.startsWith('/')) {
    problems.cwd = trans.__('A folder is given from the root: /home/...');
  }
  if (fields.size === 'gpus' && !GPUS.test(fields.gpus.trim())) {
    problems.gpus = trans.__('A part of one GPU like 0.5 or 1/4, or a number of GPUs');
  }
  if (fields.size === 'memory' && !MEMORY.test(fields.memory.replace(/\s/g, ''))) {
    problems.memory = trans.__('A size of memory, like 20GiB');
  }
  if (fields.name.length > 100) {
    problems.name = trans.__('At most 100 characters');
  }
  if (!/^(\d|10)$/.test(fields.retries.trim())) {
    problems.retries = trans.__('A number from 0 to 10');
  }
  if (!(/^\s*-?\d+\s*$/.test(fields.priority) && Math.abs(Number(fields.priority)) <= 100)) {
    problems.priority = trans.__('A whole number from -100 to 100');
  }
  if (fields.maxRun.trim() !== '' && secondsOf(fields.maxRun) === null) {
    problems.maxRun = trans.__('A time with its unit, like: 30 min, 4 h or 2 d');
  }
  if (fields.notifyUrl.trim() !== '' && !/^https?:\/\/[^\s/]/.test(fields.notifyUrl.trim())) {
    problems.notifyUrl = trans.__('An address like https://chat.example.org/hook');
  }
  return problems;
}

/** Returns the request for valid fields. */
export function requestOf(fields: IFields): ILaunchRequest {
  const file = fields.path !== '';
  return {
    path: fields.path,
    command: file ? '' : fields.command,
    arguments: file && !isNotebook(fields.path) ? fields.arguments : '',
    parameters: isNotebook(fields.path) ? pairsOf(fields.parameters) ?? {} : {},
    kernel: runsInKernel(fields.path) ? fields.kernel : '',
    cwd: fields.cwd || null,
    variables: nonEmpty(fields.variables),
    gpus: fields.size === 'gpus' ? fields.gpus.trim() : '1',
    memory: fields.size === 'memory' ? fields.memory.trim().replace(/\s/g, '') : null,
    profile: fields.size === 'profile' ? fields.profile : null,
    project: fields.project || null,
    name: fields.name.trim() || null,
    borrow: fields.borrow,
    move: fields.move,
    share: fields.share,
    checkpoint: fields.checkpoint,
    notify: fields.notify,
    notify_url: fields.notifyUrl.trim(),
    notify_mail: false,
    retries: Number(fields.retries),
    max_run_s: secondsOf(fields.maxRun),
    priority: Number(fields.priority),
    grace_s: fields.grace,
    at: ''
  };
}

/** Returns the change from a job to a request; null keeps a field. */
export function changeOf(job: IJob, request: ILaunchRequest): IJobChange {
  const sizes = ['gpus', 'memory', 'profile'] as const;
  const sameSize = sizes.every(size => request[size] === job[size]);
  return {
    gpus: sameSize ? null : request.gpus,
    memory: sameSize ? null : request.memory,
    profile: sameSize ? null : request.profile,
    project: request.project === job.project ? null : request.project,
    priority: request.priority === job.priority ? null : request.priority,
    max_run_s: request.max_run_s === job.max_run_s ? null : request.max_run_s ?? 0
  };
}

/** Returns whether a file runs in a kernel's environment. */
export function runsInKernel(path: string): boolean {
  return isNotebook(path) || path.endsWith('.py');
}

export function isNotebook(path: string): boolean {
  return path.endsWith('.ipynb');
}

/** The state of one open dialog. */
export class LaunchModel {
  constructor(private readonly _options: LaunchModel.IOptions) {
    this._fields = { ...BLANK, ..._options.fields };
    this._touched = new Set(Object.keys(_options.fields ?? {}) as (keyof IFields)[]);
    void this.readFile();
    this._askLater(0);
  }

  get changed(): ISignal<this, void> {
    return this._changed;
  }

  get fields(): IFields {
    return this._fields;
  }

  /** Defaults that the server read from the file; null until they arrive. */
  get form(): ILaunchForm | null {
    return this._form;
  }

  get projects(): readonly string[] {
    return this._offers?.projects ?? this._options.projects();
  }

  /** Whether jobs may share a GPU at this site. */
  get shares(): boolean {
    return this._offers?.shares ?? false;
  }

  /** The live line above the button: when the job would start, or why it would be refused; or empty. */
  get outlook(): string {
    return this._outlook;
  }

  /** Error message about an unreadable file or a refused job; or empty. */
  get refusal(): string {
    return this._refusal;
  }

  get busy(): boolean {
    return this._busy;
  }

  get problems(): Problems {
    return problemsOf(this._fields);
  }

  /** The problems to show.  A missing program is shown only after the user typed one or submitted. */
  get shownProblems(): Problems {
    const { command, ...others } = this.problems;
    return command === undefined || this._tried ? this.problems : others;
  }

  set(change: Partial<IFields>): void {
    this._fields = { ...this._fields, ...change };
    for (const field of Object.keys(change) as (keyof IFields)[]) {
      this._touched.add(field);
    }
    this._tried ||= 'path' in change || 'command' in change;
    if (['size', 'gpus', 'memory', 'project', 'borrow', 'share', 'checkpoint'].some(field => field in change)) {
      this._askLater(ASK_AFTER_MS);
    }
    this._changed.emit();
  }

  /** Reads the defaults of the file; fields that the user edited stay. */
  async readFile(): Promise<void> {
    const path = this._fields.path;
    try {
      const form = await this._options.launchForm(path);
      if (this._fields.path !== path) {
        return;
      }
      this._form = form;
      this._read = path;
      this._refusal = '';
      this._propose({ cwd: form.cwd, kernel: form.kernel, parameters: lines(form.parameters) });
    } catch (error) {
      if (this._fields.path === path) {
        this._refusal = error instanceof Error ? error.message : String(error);
      }
    }
    this._changed.emit();
  }

  /**
   * Submits the job, after reading the defaults of a file that was just named.  Returns
   * null when the job was refused (see `refusal`) or the path changed meanwhile.
   */
  async submit(): Promise<IJob | null> {
    if (this._busy) {
      return null;
    }
    this._tried = true;
    if (!this._isValid()) {
      this._changed.emit();
      return null;
    }
    this._busy = true;
    this._refusal = '';
    this._changed.emit();
    try {
      if (this._read !== this._fields.path) {
        await this.readFile();
      }
      if (this._read !== this._fields.path || !this._isValid()) {
        return null;
      }
      const request = requestOf(this._fields);
      this._identify(request);
      return await this._options.launch({ ...request, at: this._at }, this._key);
    } catch (error) {
      this._refusal = error instanceof Error ? error.message : String(error);
      return null;
    } finally {
      this._busy = false;
      this._changed.emit();
    }
  }

  dispose(): void {
    this._questions++;
    clearTimeout(this._timer);
    Signal.clearData(this);
  }

  /** Sets key and time of a request; equal requests get equal ones. */
  private _identify(request: ILaunchRequest): void {
    const text = JSON.stringify(request);
    if (text !== this._sent) {
      this._sent = text;
      this._at = new Date().toISOString();
      this._key = Array.from(crypto.getRandomValues(new Uint8Array(16)), byte =>
        byte.toString(16).padStart(2, '0')
      ).join('');
    }
  }

  private _isValid(): boolean {
    return Object.keys(this.problems).length === 0;
  }

  private _propose(proposed: Partial<IFields>): void {
    const open = Object.entries(proposed).filter(([field]) => !this._touched.has(field as keyof IFields));
    this._fields = { ...this._fields, ...Object.fromEntries(open) };
  }

  private _askLater(after_ms: number, again = false): void {
    clearTimeout(this._timer);
    this._timer = setTimeout(() => {
      if (again && this._options.isHidden?.()) {
        this._askLater(after_ms, again);
      } else {
        void this._ask(again);
      }
    }, after_ms);
  }

  /** Asks for the outlook; with `again`, the previous one stays visible until the answer arrives. */
  private async _ask(again: boolean): Promise<void> {
    const { size, gpus, memory, profile, project, borrow, share, checkpoint } = this._fields;
    const problems = this.problems;
    const question = ++this._questions;
    if (problems.gpus !== undefined || problems.memory !== undefined) {
      this._outlook = '';
      this._changed.emit();
      return;
    }
    if (!again) {
      this._outlook = trans.__('Asking what is free.');
      this._changed.emit();
    }
    let outlook: string;
    try {
      const offers = await this._options.offers({
        project,
        gpus: size === 'gpus' ? gpus.trim() : '',
        memory: size === 'memory' ? memory.trim().replace(/\s/g, '') : '',
        profile: size === 'profile' ? profile : '',
        borrow: borrow ? '' : '0',
        // Only a job that can be suspended becomes a guest.
        share: share && checkpoint.startsWith('suspend') ? '1' : ''
      });
      this._offers = offers;
      this._propose({ project: offers.project });
      outlook = offers.job?.sentence ?? '';
    } catch (error) {
      outlook = error instanceof Error ? error.message : String(error);
    }
    // Answers may arrive out of order: only the newest request counts.
    if (question === this._questions) {
      this._outlook = outlook;
      this._changed.emit();
      this._askLater(ASK_AGAIN_MS, true);
    }
  }

  private readonly _changed = new Signal<this, void>(this);
  private readonly _touched: Set<keyof IFields>;
  private _sent = '';
  private _key = '';
  private _at = '';
  private _fields: IFields;
  private _form: ILaunchForm | null = null;
  /** The path of `_form`, as typed. */
  private _read: string | null = null;
  private _offers: IOffers | null = null;
  private _outlook = '';
  private _refusal = '';
  private _busy = false;
  /** Whether the user has typed a program or submitted. */
  private _tried = false;
  private _questions = 0;
  private _timer: ReturnType<typeof setTimeout> | undefined;
}

export namespace LaunchModel {
  export interface IOptions {
    readonly fields?: Partial<IFields>;
    readonly launchForm: (path: string) => Promise<ILaunchForm>;
    readonly offers: (query: IOffersQuery) => Promise<IOffers>;
    readonly launch: (request: ILaunchRequest, key: string) => Promise<IJob>;
    /** Projects of the user, until the first offer arrives. */
    readonly projects: () => readonly string[];
    /** Returns whether the page is hidden; the outlook is then not refreshed. */
    readonly isHidden?: () => boolean;
  }
}
