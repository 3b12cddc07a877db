/** The dialogs that resize the GPU part of a running server, or get its first one. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { Signal } from '@lumino/signaling';
import React from 'react';

import { BLANK, IFields } from './launch';
import { IForm, Project, showForm, Switch, Text, Verdict } from './launchdialog';
import { memory } from './messages';
import { sizeOf } from './typed';
import { ILeaseStatus, ISizedLease, ISizeRequest } from './wire';
import { trans } from './translate';

/**
 * Asks for a size and sends it; a server without a GPU (`lease` is null) gets its first one.
 *
 * If the size is fixed while the server runs, explains that instead.
 */
export async function resize(
  lease: ILeaseStatus | null,
  projects: readonly string[],
  hub: (() => void) | null,
  send: (size: ISizeRequest) => Promise<ISizedLease>
): Promise<void> {
  if (lease !== null && !lease.resizable) {
    await explain(lease, hub);
    return;
  }
  const plan =
    lease === null
      ? {
          title: trans.__('Get a GPU'),
          intro: trans.__('This server gets a part of a GPU while it runs. Kernels and their variables stay.'),
          label: trans.__('Size'),
          button: trans.__('Get it'),
          busy: trans.__('Getting it.'),
          projects,
          receipt: gainedText
        }
      : {
          title: trans.__('Change size'),
          intro: trans.__(
            'This server has %1 (%2) and uses %3. Kernels and their variables stay.',
            lease.size,
            memory(lease.memory_limit_bytes),
            memory(lease.memory_used_bytes)
          ),
          label: trans.__('New size'),
          button: trans.__('Change'),
          busy: trans.__('Changing.'),
          projects: [lease.project],
          receipt: resizedText
        };
  const choice = new Choice(plan.projects, send);
  const form = (): JSX.Element => <Form choice={choice} {...plan} />;
  const sized = await showForm(choice, plan.title, plan.button, form);
  if (sized !== null) {
    Notification.success(plan.receipt(sized), { autoClose: 10000 });
  }
}

async function explain(lease: ILeaseStatus, hub: (() => void) | null): Promise<void> {
  const close = Dialog.cancelButton({ label: trans.__('Close') });
  const open = Dialog.okButton({ label: trans.__('Hub control panel') });
  const answer = await showDialog({
    title: trans.__('Change size'),
    body: trans.__(
      'This server has to start anew for another size: stop it, then start it with the size that you need. It has %1. Save your work first: variables are lost.',
      lease.size
    ),
    buttons: hub === null ? [close] : [close, open]
  });
  if (answer.button.accept) {
    hub?.();
  }
}

/** The choice in an open dialog: a size as `gpus`, a project, and whether to borrow. */
class Choice implements IForm<ISizedLease> {
  constructor(
    /** The projects to choose from; the first is preselected. */
    readonly projects: readonly string[],
    /** Resolves once the server has the size. */
    private readonly _send: (size: ISizeRequest) => Promise<ISizedLease>
  ) {
    this.fields = { ...BLANK, gpus: '', borrow: false, project: projects[0] ?? '' };
  }

  readonly changed = new Signal<this, void>(this);
  readonly shownProblems = {};
  fields: IFields;
  refusal = '';
  busy = false;

  set(change: Partial<IFields>): void {
    this.fields = { ...this.fields, ...change };
    this._become(this.busy, '');
  }

  async submit(): Promise<ISizedLease | null> {
    const { gpus, borrow, project } = this.fields;
    const size = sizeOf(gpus, borrow, project);
    if (this.busy || size === null) {
      this._become(this.busy, this.busy ? this.refusal : hintText());
      return null;
    }
    this._become(true, '');
    try {
      const sized = await this._send(size);
      this._become(false, '');
      return sized;
    } catch (error) {
      this._become(false, error instanceof Error ? error.message : String(error));
      return null;
    }
  }

  dispose(): void {
    Signal.clearData(this);
  }

  private _become(busy: boolean, refusal: string): void {
    this.busy = busy;
    this.refusal = refusal;
    this.changed.emit();
  }
}

function hintText(): string {
  return trans.__('A part of the GPU like 0.5 or 1/4, or memory like 20GiB');
}

function resizedText(lease: ILeaseStatus): string {
  return trans.__(
    'You have %1 now (%2). PyTorch and CuPy see it at once; restart kernels that use JAX or TensorFlow.',
    lease.size,
    memory(lease.memory_limit_bytes)
  );
}

function gainedText(lease: ISizedLease): string {
  const { size, restart } = lease;
  const limit = memory(lease.memory_limit_bytes);
  const has = lease.state === 'suspended'
    ? trans.__('You have %1 (%2). It is lent just now and comes with your first GPU cell.', size, limit)
    : trans.__('You have %1 now (%2).', size, limit);
  return restart.length === 0
    ? has
    : trans.__('%1 Kernels that looked for a GPU before see it after a restart: %2.', has, restart.join(', '));
}

function Form(props: { choice: Choice; intro: string; label: string; busy: string }): JSX.Element {
  const { choice, intro, label, busy } = props;
  return (
    <>
      <p>{intro}</p>
      <Text model={choice} field="gpus" label={label} hint={hintText()} isRefused={choice.refusal !== ''} />
      <Project model={choice} />
      <Switch
        model={choice}
        field="borrow"
        label={trans.__('Also beyond what project %1 is guaranteed', choice.fields.project)}
        hint={trans.__('This session may then be put to sleep when others need the GPU.')}
      />
      <Verdict model={choice} busy={busy} />
    </>
  );
}
