/** What a dialog changes of a job in the queue. */

import { IJob, IJobChange, ILaunchRequest } from './wire';

/** Returns what differs; null: as it is. */
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
