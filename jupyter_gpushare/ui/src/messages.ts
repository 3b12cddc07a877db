/** Sentences of the page itself; the only module that formats sizes. */


import { CATALOGUE } from './catalogue';
import type { IDay } from './days';
import { GIB, TENTHS_BELOW } from './sizes';
import { numberText, timeText, weekday } from './locale';
import type { GpuState, Notice, Phase } from './state';
import type { CheckpointMode, IHistory, IJob, ILeaseStatus, IProjectUse } from './wire';
import { trans } from './translate';

/** `6.8` below ten, `40` above: GiB without the unit, like Python's `gibibytes`. */
export function gibibytes(bytes: number): string {
  const value = bytes / GIB;
  return value > 0 && value < TENTHS_BELOW ? value.toFixed(1) : value.toFixed(0);
}

/** `6.8 GiB`: an amount of memory, in the format of the broker's sentences. */
export function memory(bytes: number): string {
  return CATALOGUE['memory']!(trans, [gibibytes(bytes)]);
}

/** `0.5`, `2`: a number of GPUs, from thousandths. */
export function gpus(milli: number): string {
  return String(milli / 1000);
}

/** `12 s`, `5 min`, `2 h`: one unit, rounded. */
export function duration(seconds: number): string {
  if (seconds < 90) {
    return trans.__('%1 s', Math.max(0, Math.round(seconds)));
  }
  if (seconds < 5400) {
    return trans.__('%1 min', Math.round(seconds / 60));
  }
  return trans.__('%1 h', Math.round(seconds / 3600));
}

/** Returns a server's error message as a sentence: capital letter, full stop. */
export function asSentence(text: string): string {
  const begun = /^[a-z]+[ ,]/.test(text) ? text[0]!.toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** `1/2 GPU 6.8/40 GiB Active`; empty to show nothing. */
export function statusText(state: GpuState): string {
  switch (state.kind) {
    case 'loading':
    case 'off':
      return '';
    case 'unreachable':
      return trans.__('GPU: no data');
    case 'ready':
      return state.lease === null ? trans.__('No GPU') : leaseText(state.lease);
  }
}

function leaseText(lease: ILeaseStatus): string {
  // While the lease sleeps, the last measurement may be older than the sleep.
  const used = gibibytes(lease.memory_saved_bytes > 0 ? 0 : lease.memory_used_bytes);
  return trans.__(
    '%1 %2/%3 %4',
    lease.size,
    used,
    memory(lease.memory_limit_bytes),
    lease.badge
  );
}

/** The sentence under the badge. */
export function sentence(state: GpuState): string {
  switch (state.kind) {
    case 'loading':
      return trans.__('Asking the GPU broker.');
    case 'off':
      return trans.__('This server was started without a GPU broker.');
    case 'unreachable':
      return state.source === 'server'
        ? trans.__('No answer from your server since %1.', timeText(state.since))
        : trans.__(
            'No news from the GPU broker since %1. Your kernel keeps running.',
            timeText(state.since)
          );
    case 'ready':
      if (state.lease !== null) {
        return state.lease.sentence;
      }
      return state.mayGain
        ? trans.__('This server has no GPU. It can get one while it runs.')
        : trans.__('This server has no GPU. Stop it and start it again to pick one.');
  }
}

/** Returns whether the status bar item is highlighted. */
export function wantsAttention(state: GpuState, phase: Phase | null): boolean {
  return state.kind === 'unreachable' || phase === 'warned' || phase === 'waking' || phase === 'lost';
}

/** The text of the GPU memory meter for screen readers. */
export function memoryText(lease: ILeaseStatus): string {
  if (lease.memory_saved_bytes > 0) {
    return trans.__('%1 in RAM', memory(lease.memory_saved_bytes));
  }
  return trans.__(
    '%1 of %2',
    gibibytes(lease.memory_used_bytes),
    memory(lease.memory_limit_bytes)
  );
}

/** The numbers of a project, with the colour of each in the bar. */
export function projectParts(
  project: IProjectUse
): { readonly text: string; readonly kind: 'mark' | 'used' | 'borrowed' | 'lent' | null }[] {
  const { in_use_milli: used, borrowed_milli: borrowed, lent_milli: lent, waiting } = project;
  const parts: ReturnType<typeof projectParts> = [
    { text: trans.__('%1 guaranteed', gpus(project.quota_milli)), kind: 'mark' },
    { text: trans.__('%1 in use', gpus(used)), kind: used > borrowed ? 'used' : null }
  ];
  if (borrowed > 0) {
    parts.push({ text: trans.__('%1 borrowed', gpus(borrowed)), kind: 'borrowed' });
  }
  if (lent > 0) {
    parts.push({ text: trans.__('%1 lent', gpus(lent)), kind: 'lent' });
  }
  if (waiting > 0) {
    parts.push({ text: trans._n('%1 job waiting', '%1 jobs waiting', waiting), kind: null });
  }
  return parts;
}

/** The text of a project's bar for screen readers. */
export function projectText(project: IProjectUse): string {
  return projectParts(project)
    .map(part => part.text)
    .join(', ');
}

/** The state of a job in a word or two. */
export function jobBadge(job: IJob): string {
  switch (job.state) {
    case 'queued':
      return job.position === null
        ? trans.__('Queued')
        : trans.__('Queued, number %1', job.position);
    case 'starting':
      return trans.__('Starting');
    case 'running':
      if (job.shared !== '') {
        return job.shared === 'guest' ? trans.__('Running as a guest') : trans.__('Running, shared');
      }
      return trans.__('Running');
    case 'suspended':
      return trans.__('Paused');
    case 'stopping':
      return trans.__('Stopping');
    case 'succeeded':
      return trans.__('Done');
    case 'failed':
      return trans.__('Failed');
    case 'cancelled':
      return trans.__('Cancelled');
    case 'timed_out':
      return trans.__('Timed out');
  }
}

/** Returns with which job a job shares its GPU and its remaining speed; empty if it does not share. */
export function sharedText(job: IJob): string {
  if (job.shared === '') {
    return '';
  }
  const other = job.shared_with === '' ? trans.__('another job') : trans.__('job %1', job.shared_with);
  const text = job.shared === 'guest' ? trans.__('as a guest of %1', other) : trans.__('with %1', other);
  const kept = job.kept_speed_percent;
  return kept === null ? text : trans.__('%1; %2 % of its own speed', text, Math.round(kept));
}

/** A reason as one line: its first line, and its last if there are more. */
export function oneLine(reason: string): string {
  const lines = reason.split('\n');
  return lines.length === 1 ? reason : `${lines[0]} ${lines[lines.length - 1]!.trim()}`;
}

/** `120 of 1,000`, `120 done`; empty if the job does not report progress. */
export function progressText(job: IJob): string {
  if (job.done === null) {
    return '';
  }
  return job.total === null || job.total <= 0
    ? trans.__('%1 done', numberText(job.done))
    : trans.__('%1 of %2', numberText(job.done), numberText(job.total));
}

/** `120 of 1,000, about 2 h left`: progress, and the time left unless the reason has the end. */
export function progressAndTimeText(job: IJob): string {
  const progress = progressText(job);
  return job.left_s === null || job.ends_in !== null
    ? progress
    : trans.__('%1, about %2 left', progress, duration(job.left_s));
}

/** The receipt for keeping a GPU. */
export function keptText(until: string, leftMinutes: number | null): string {
  const time = timeText(new Date(until));
  return leftMinutes === null
    ? trans.__('Your GPU stays with you until %1.', time)
    : trans.__('Your GPU stays with you until %1. %2 min of that are left today.', time, Math.floor(leftMinutes));
}

/** What a stop of a running job would lose. */
export function stopText(job: IJob): string {
  const ran = duration(job.ran_s);
  const parts = [
    job.done === null
      ? trans.__('It ran for %1.', ran)
      : trans.__('It ran for %1 (%2).', ran, progressText(job)),
    job.checkpoint === 'none'
      ? trans.__('It keeps no checkpoint: what it has computed is lost, unless it wrote files.')
      : trans.__('Its last checkpoint is not known: what it has computed since then is lost.')
  ];
  return parts.join(' ');
}

/** Returns the environment of a job; empty if the command decides. */
export function environmentText(job: IJob): string {
  if (job.source === null) {
    // A job of `%%gpujob` runs the kernel's Python.
    const program = job.command[0] ?? '';
    return /^\/.*\/python[0-9.]*$/.test(program) ? program : '';
  }
  if (job.source.kernel !== '') {
    return job.source.kernel;
  }
  return job.source.path.endsWith('.ipynb') ? trans.__('as the notebook says') : trans.__('of the server');
}

/** The text of a notification. */
export function noticeText(notice: Exclude<Notice, { kind: 'cleared' }>): string {
  switch (notice.kind) {
    case 'warned':
      return warningText(notice.lease);
    case 'asleep':
    case 'waking':
      return notice.lease.sentence;
    case 'lost':
      return trans.__(
        'Your GPU memory could not be brought back: the kernels that used it have to restart. Your files are safe.'
      );
    case 'back':
      return backText(notice.seconds, notice.lease.saved_lost);
    case 'job-paused':
      return pausedText(notice.job, notice.again);
    case 'job-ended':
      return trans.__('%1: %2. %3', shortName(notice.job), jobBadge(notice.job), oneLine(notice.job.reason));
    case 'jobs':
      return jobsText(notice.ended, notice.paused);
  }
}

function backText(seconds: number | null, hasLost: boolean): string {
  if (hasLost) {
    return trans.__('Your GPU is back. Some of its memory was lost meanwhile: see What happened.');
  }
  return seconds === null
    ? trans.__('Your GPU is back. Nothing was lost.')
    : trans.__('Your GPU is back after %1. Nothing was lost.', duration(Math.max(1, seconds)));
}

/** Returns a short warning: JupyterLab cuts a notification after 140 characters. */
function warningText(lease: ILeaseStatus): string {
  if (lease.memory_used_bytes === 0) {
    return trans.__(
      'Your GPU is lent in %1: others wait. It comes back with your next GPU cell.',
      duration(lease.lend_in_s ?? 0)
    );
  }
  return trans.__(
    'Your GPU is lent in %1: others wait. Its %2 of GPU memory move to RAM, and your variables stay.',
    duration(lease.lend_in_s ?? 0),
    memory(lease.memory_used_bytes)
  );
}

const PAUSED: ReadonlySet<string> = new Set(['suspended', 'queued', 'stopping']);
const NAME_LENGTH = 40;

function pausedText(job: IJob, again: boolean): string {
  const name = shortName(job);
  if (PAUSED.has(job.state)) {
    return trans.__('%1: %2', name, job.reason);
  }
  return again
    ? trans.__('%1 had to give up its GPU meanwhile, and started again as attempt %2.', name, job.attempt)
    : trans.__('%1 was paused meanwhile. Nothing was lost.', name);
}

function shortName(job: IJob): string {
  return job.name.length > NAME_LENGTH ? `${job.name.slice(0, NAME_LENGTH - 1)}…` : job.name;
}

function jobsText(ended: readonly IJob[], paused: readonly IJob[]): string {
  const failed = ended.filter(job => job.state === 'failed').length;
  const parts = [
    ended.length > 0 && trans._n('%1 job ended', '%1 jobs ended', ended.length),
    failed > 0 && trans.__('%1 of them failed', failed),
    paused.length > 0 && trans._n('%1 job was paused', '%1 jobs were paused', paused.length)
  ];
  return trans.__('Training jobs: %1.', parts.filter(Boolean).join(', '));
}

/** `6.4`, `120`: a number of GPU-hours, from GPU-seconds. */
export function gpuHours(seconds: number): string {
  const hours = seconds / 3600;
  return hours > 0 && hours < 9.95 ? hours.toFixed(1) : hours.toFixed(0);
}

/** `6.4 GPU-hours`, `12 GPU-minutes`: an amount of GPU time above 0. */
function gpuTime(seconds: number): string {
  if (seconds < 60) {
    return trans.__('less than 1 GPU-minute');
  }
  return seconds < 3600
    ? trans._n('%1 GPU-minute', '%1 GPU-minutes', Math.floor(seconds / 60))
    : trans.__('%1 GPU-hours', gpuHours(seconds));
}

/** A week in one or two sentences. */
export function weekText(week: IHistory): string {
  const used =
    week.used_gpu_s <= 0
      ? trans.__('You used no GPU.')
      : trans.__('You used %1.', gpuTime(week.used_gpu_s));
  if (week.lent_gpu_s <= 0) {
    return used;
  }
  const lent = gpuTime(week.lent_gpu_s);
  return (
    used +
    ' ' +
    (week.helped_jobs === 0
      ? trans.__('Your idle time gave %1 to others.', lent)
      : trans.__(
          'Your idle time gave %1 to others; %2 of them had waited for your GPU.',
          lent,
          week.helped_jobs
        ))
  );
}

/** The text of a week's chart for screen readers. */
export function daysText(days: readonly IDay[]): string {
  const each = days.map(({ day, usedGpuS, lentGpuS }) =>
    trans.__('%1: %2 used, %3 given to others', weekday(day, true), gpuHours(usedGpuS), gpuHours(lentGpuS))
  );
  return trans.__('GPU-hours a day. %1.', each.join('; '));
}

/** Returns the label of a checkpoint mode. */
export function checkpointLabel(checkpoint: CheckpointMode): string {
  const words: { readonly [checkpoint in CheckpointMode]: string } = {
    suspend: trans.__('Suspend, and go on where it was'),
    'suspend,sigterm': trans.__('Suspend, or stop where that is better'),
    sigterm: trans.__('Stop, and start again from its own checkpoint'),
    none: trans.__('Start again from the beginning')
  };
  return words[checkpoint];
}

/** Returns the explanation of a checkpoint mode. */
export function checkpointText(checkpoint: CheckpointMode): string {
  const words: { readonly [checkpoint in CheckpointMode]: string } = {
    suspend: trans.__('Its GPU memory moves to RAM meanwhile. Nothing has to be changed in your program.'),
    'suspend,sigterm': trans.__(
      'It is stopped where it cannot be suspended, or would not get its GPU back soon. Then your program saves a checkpoint at SIGTERM, and loads the newest when it starts.'
    ),
    sigterm: trans.__('Your program saves a checkpoint at SIGTERM, and loads the newest when it starts.'),
    none: trans.__('Whatever it had done is done once more.')
  };
  return words[checkpoint];
}

/** Returns both steps of a slow resume, with the seconds so far. */
export function wakingSteps(lease: ILeaseStatus, seconds: number): string {
  if (lease.memory_saved_bytes === 0) {
    return trans.__('Getting the GPU back, %1 s so far.', Math.floor(seconds));
  }
  const step =
    lease.state === 'resuming'
      ? trans.__('step 2 of 2, copying %1 back', memory(lease.memory_saved_bytes))
      : trans.__('step 1 of 2, getting the GPU back');
  return trans.__('Waking up: %1, %2 s so far.', step, Math.floor(seconds));
}

/** The answer to an interrupt while the GPU comes back. */
export function interruptedText(lease: ILeaseStatus): string {
  return lease.state === 'suspended'
    ? trans.__(
        'Your cell waits for the GPU and is interrupted when it is back. To end it now, restart the kernel.'
      )
    : trans.__('Your cell is interrupted as soon as the GPU memory is copied back.');
}

/** The answer to a restart while the GPU comes back. */
export function restartedText(ends: boolean): string {
  return ends
    ? trans.__('The kernel restarts, and no cell waits for the GPU any more: it comes back with your next GPU cell.')
    : trans.__('The kernel restarts; the GPU comes back meanwhile.');
}

/** Returns the current step of a resume, to show after the broker's sentence. */
export function wakingStep(lease: ILeaseStatus, seconds: number): string {
  if (lease.memory_saved_bytes === 0) {
    return trans.__('%1 s so far.', Math.floor(seconds));
  }
  return trans.__('Step %1 of 2, %2 s so far.', lease.state === 'resuming' ? 2 : 1, Math.floor(seconds));
}

/** Returns the marker of a gap in a log; the download and `gpushare logs` use the same text. */
export function gapText(bytes: number): string {
  return trans.__('[%1 bytes of this log were not kept]', bytes);
}

/** Returns the sentence about bytes of a running job's log that could not be written to disk. */
export function leftOutText(bytes: number, why: string): string {
  return trans.__('%1 bytes of this log were not written: %2. The job keeps the last 64 KiB while it runs.', bytes, why);
}

/** Returns the word for one event in a job's timeline. */
export function momentText(what: string): string {
  const words: { readonly [what: string]: string } = {
    submitted: trans.__('Submitted'),
    grant: trans.__('Starting'),
    started: trans.__('Started'),
    progress: trans.__('Progress'),
    suspend: trans.__('Paused'),
    resume: trans.__('Resumed'),
    requeue: trans.__('Back in queue'),
    edit: trans.__('Changed'),
    move: trans.__('Moved'),
    ended: trans.__('Ended'),
    admin: trans.__('Administrator'),
    device: trans.__('GPU'),
    guest: trans.__('Guest'),
    'low-use': trans.__('GPU'),
    watchdog: trans.__('GPU'),
    lost: trans.__('GPU state lost'),
    time_limit: trans.__('Time limit')
  };
  return words[what] ?? trans.__('Note');
}
