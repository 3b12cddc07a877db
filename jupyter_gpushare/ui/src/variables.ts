import type { IJob } from './wire';

/** The variables that its owner chose: one more is set for every job from this page. */
export function chosenVariables(job: IJob): string[] {
  return job.variables.filter(name => name !== 'PYTHONUNBUFFERED');
}
