// SPDX-License-Identifier: Apache-2.0
// What a user's E2B program in JavaScript does. Prints one JSON line of results.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { CommandExitError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

const results = { client: 'e2b js', passed: [], failed: {} }
const tag = randomUUID().slice(0, 8)

async function step(name, body) {
  try {
    await body()
    results.passed.push(name)
  } catch (error) {
    results.failed[name] = String(error?.stack ?? error)
  }
}

const sandbox = await Sandbox.create({
  timeoutMs: 120_000,
  metadata: { tag, 'a b': 'c&d' },
  envs: { GREETING: 'hi' },
})

await step('run a command', async () => {
  const out = await sandbox.commands.run('echo hello $GREETING; echo oops >&2')
  assert.equal(out.stdout, 'hello hi\n')
  assert.equal(out.stderr, 'oops\n')
})

await step('exit code', async () => {
  await assert.rejects(sandbox.commands.run('exit 5'), (error) => {
    assert.ok(error instanceof CommandExitError)
    return error.exitCode === 5
  })
})

await step('stream output', async () => {
  let seen = ''
  await sandbox.commands.run('for i in 1 2 3; do echo $i; sleep 0.1; done', {
    onStdout: (data) => { seen += data },
  })
  assert.equal(seen, '1\n2\n3\n')
})

await step('stdin', async () => {
  const command = await sandbox.commands.run('cat', { background: true, stdin: true })
  await sandbox.commands.sendStdin(command.pid, 'typed\n')
  await sandbox.commands.closeStdin(command.pid)
  assert.equal((await command.wait()).stdout, 'typed\n')
})

await step('background and kill', async () => {
  const command = await sandbox.commands.run('sleep 300', { background: true })
  const pids = (await sandbox.commands.list()).map((process) => process.pid)
  assert.ok(pids.includes(command.pid))
  assert.equal(await command.kill(), true)
})

await step('timeout', async () => {
  await assert.rejects(sandbox.commands.run('sleep 30', { timeoutMs: 1000 }), TimeoutError)
})

await step('pty', async () => {
  let screen = ''
  const decoder = new TextDecoder()
  const terminal = await sandbox.pty.create({
    cols: 80,
    rows: 24,
    onData: (data) => { screen += decoder.decode(data) },
    timeoutMs: 30_000,
  })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('echo mark$((40+2)); exit\n'))
  await terminal.wait()
  assert.match(screen, /mark42/)
})

await step('files', async () => {
  await sandbox.files.write('notes/a.txt', 'text')
  assert.equal(await sandbox.files.read('notes/a.txt'), 'text')
  await sandbox.files.write('notes/b.bin', new Uint8Array([0, 255]).buffer)
  assert.deepEqual([...(await sandbox.files.read('notes/b.bin', { format: 'bytes' }))], [0, 255])
  assert.deepEqual((await sandbox.files.list('notes')).map((entry) => entry.name), ['a.txt', 'b.bin'])
  await sandbox.files.rename('notes/a.txt', 'notes/c.txt')
  assert.equal(await sandbox.files.exists('notes/a.txt'), false)
  await sandbox.files.remove('notes')
  await assert.rejects(sandbox.files.read('notes/c.txt'), NotFoundError)
})

await step('several files in one call', async () => {
  await sandbox.files.write([
    { path: 'many/ü.txt', data: '1' },
    { path: 'many/b c.txt', data: '2' },
  ])
  assert.equal(await sandbox.files.read('many/ü.txt'), '1')
})

await step('watch', async () => {
  await sandbox.files.makeDir('watched')
  const events = []
  const handle = await sandbox.files.watchDir('watched', (event) => { events.push(event) })
  await sandbox.files.write('watched/new.txt', 'x')
  for (let i = 0; i < 200 && events.length < 3; i++) await new Promise((done) => setTimeout(done, 50))
  await handle.stop()
  assert.deepEqual(events.slice(0, 3).map((event) => event.type), ['create', 'chmod', 'write'])
})

await step('signed urls', async () => {
  await sandbox.files.write('signed.txt', 'by url')
  const url = await sandbox.downloadUrl('signed.txt', { useSignatureExpiration: 60_000 })
  const answer = await fetch(url)
  assert.equal(answer.status, 200)
  assert.equal(await answer.text(), 'by url')
})

await step('info and list', async () => {
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.deepEqual(info.metadata, { tag, 'a b': 'c&d' })
  const paginator = Sandbox.list({ query: { metadata: { tag, 'a b': 'c&d' }, state: ['running', 'paused'] } })
  assert.deepEqual((await paginator.nextItems()).map((found) => found.sandboxId), [sandbox.sandboxId])
})

await step('timeout can be set', async () => {
  await sandbox.setTimeout(300_000)
  assert.ok((await sandbox.getInfo()).endAt.getTime() - Date.now() > 200_000)
})

await step('connect', async () => {
  const other = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await other.commands.run('echo same')).stdout, 'same\n')
})

await step('kill', async () => {
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.isRunning(), false)
})

console.log(JSON.stringify(results))
process.exit(Object.keys(results.failed).length ? 1 : 0)
