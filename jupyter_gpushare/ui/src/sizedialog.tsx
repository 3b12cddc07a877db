/** The dialogs that make the GPU part of a running server larger or smaller, or get its first one. */

import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';
import { ReactWidget, UseSignal } from '@jupyterlab/ui-components';
import { Signal } from '@lumino/signaling';
import React from 'react';

import { memory } from './messages';
import { sizeOf } from './newsize';
import { ILeaseStatus, ISizedLease, ISizeRequest } from './wire';
import { trans } from './translate';

/** What the dialog says, and what it sends. */
interface IPlan {
  readonly title: string;
  readonly intro: string;
  readonly label: string;
  readonly button: string;
  readonly busy: string;
  /** Those to choose from; the first is preselected. */
  readonly projects: readonly string[];
  /** Resolves once the size is there. */
  readonly send: (size: ISizeRequest) => Promise<ISizedLease>;
  readonly receipt: (sized: ISizedLease) => string;
}

/**
 * Asks for a size and sends it; null is a server without a GPU, which gets its first one.
 *
 * Where the size is fixed while a server runs, says that instead.
 */
export async function resize(
  lease: ILeaseStatus | null,
  projects: readonly string[],
  hub: (() => void) | null,
  send: IPlan['send']
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
          receipt: (sized: ISizedLease) => gainedText(sized)
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
          receipt: (sized: ISizedLease) => resizedText(sized)
        };
  const dialog = new SizeDialog(new Choice({ ...plan, send }));
  dialog.addClass('gpushare-launch-dialog');
  await dialog.launch();
  await dialog.sending;
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

/** What is chosen in an open dialog, and the refusal of the last try. */
class Choice {
  constructor(
    readonly plan: IPlan,
  ) {
    this.project = plan.projects[0] ?? '';
  }

  readonly changed = new Signal<this, void>(this);
  text = '';
  project: string;
  borrow = false;
  refusal = '';
  busy = false;

  set(change: { text?: string; borrow?: boolean; project?: string }): void {
    Object.assign(this, change, { refusal: '' });
    this.changed.emit();
  }

  /** Returns the receipt; null: it was refused. */
  async submit(): Promise<string | null> {
    const size = sizeOf(this.text, this.borrow, this.project);
    if (this.busy || size === null) {
      this.refusal = this.busy ? this.refusal : trans.__('A part of the GPU like 0.5 or 1/4, or memory like 20GiB');
      this.changed.emit();
      return null;
    }
    this.busy = true;
    this.refusal = '';
    this.changed.emit();
    try {
      return this.plan.receipt(await this.plan.send(size));
    } catch (error) {
      this.refusal = error instanceof Error ? error.message : String(error);
      return null;
    } finally {
      this.busy = false;
      this.changed.emit();
    }
  }
}

class SizeDialog extends Dialog<void> {
  constructor(
    private readonly _choice: Choice,
  ) {
    super({
      title: _choice.plan.title,
      body: new SizeBody(_choice),
      focusNodeSelector: 'input',
      buttons: [
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        Dialog.okButton({ label: _choice.plan.button })
      ]
    });
  }

  /** Until nothing is under way. */
  sending: Promise<unknown> = Promise.resolve();

  /** Closes once the size is there; a refusal leaves the dialog open. */
  override resolve(index?: number): void {
    if (index === 0) {
      super.resolve(0);
      return;
    }
    this.sending = this._choice.submit().then(receipt => {
      if (receipt !== null) {
        Notification.success(receipt, { autoClose: 10000 });
        super.resolve(1);
      }
    });
  }
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

class SizeBody extends ReactWidget {
  constructor(
    private readonly _choice: Choice,
  ) {
    super();
    this.addClass('gpushare-launch');
  }

  protected override render(): JSX.Element {
    return (
      <UseSignal signal={this._choice.changed}>
        {() => <Form choice={this._choice} />}
      </UseSignal>
    );
  }
}

function Form({ choice }: { choice: Choice }): JSX.Element {
  const { plan, project, refusal } = choice;
  return (
    <>
      <p>{plan.intro}</p>
      <div className="gpushare-field">
        <label htmlFor="gpushare-resize-size">{plan.label}</label>
        <input
          type="text"
          className="jp-mod-styled"
          id="gpushare-resize-size"
          value={choice.text}
          spellCheck={false}
          autoComplete="off"
          aria-invalid={refusal !== ''}
          aria-describedby="gpushare-resize-hint"
          onChange={({ target: { value } }) => choice.set({ text: value })}
        />
        <span className="gpushare-muted" id="gpushare-resize-hint">
          {trans.__('A part of the GPU like 0.5 or 1/4, or memory like 20GiB')}
        </span>
      </div>
      {plan.projects.length > 1 && (
        <div className="gpushare-field">
          <label htmlFor="gpushare-resize-project">{trans.__('Project')}</label>
          <select
            className="jp-mod-styled"
            id="gpushare-resize-project"
            value={project}
            onChange={({ target: { value } }) => choice.set({ project: value })}
          >
            {plan.projects.map(name => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </div>
      )}
      <div className="gpushare-field gpushare-switch">
        <label>
          <input
            type="checkbox"
            checked={choice.borrow}
            aria-describedby="gpushare-resize-borrow"
            onChange={({ target: { checked } }) => choice.set({ borrow: checked })}
          />
          {trans.__('Also beyond what project %1 is guaranteed', project)}
        </label>
        <span className="gpushare-muted" id="gpushare-resize-borrow">
          {trans.__('This session may then be put to sleep when others need the GPU.')}
        </span>
      </div>
      <div className="gpushare-verdict">
        {refusal !== '' && (
          <p className="gpushare-refusal" role="alert">
            {refusal}
          </p>
        )}
        {choice.busy && <p role="status">{plan.busy}</p>}
      </div>
    </>
  );
}
