/** Text of the launch dialog that has one thing a line. */

/** Returns `name = value` lines. */
export function lines(pairs: { readonly [name: string]: string }): string {
  return Object.entries(pairs)
    .map(([name, value]) => `${name} = ${value}`)
    .join('\n');
}

/** Returns the pairs of `name = value` lines; null if a line is malformed. */
export function pairsOf(text: string): { [name: string]: string } | null {
  const pairs: { [name: string]: string } = {};
  for (const line of nonEmpty(text)) {
    // As Python has names, in any script.
    const match = /^([\p{XIDS}_]\p{XIDC}*)\s*=\s*(.*)$/u.exec(line);
    if (match === null) {
      return null;
    }
    pairs[match[1]!] = match[2]!;
  }
  return pairs;
}

/** Returns the lines with text, trimmed. */
export function nonEmpty(text: string): string[] {
  return text
    .split('\n')
    .map(line => line.trim())
    .filter(line => line !== '');
}
