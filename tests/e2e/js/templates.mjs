// SPDX-License-Identifier: Apache-2.0
// Template builds, as a user's E2B program in JavaScript does them. Prints one JSON line of
// results. Arguments: an image that can be pulled, and a directory to write a context into.
import assert from 'node:assert/strict'
import { mkdirSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { BuildError, Sandbox, Template, waitForPort } from 'e2b'

const [image, context] = process.argv.slice(2)
const results = { client: 'e2b js', passed: [], failed: {} }

async function step(name, body) {
  try {
    await body()
    results.passed.push(name)
  } catch (error) {
    results.failed[name] = String(error?.stack ?? error)
  }
}

mkdirSync(join(context, 'src'), { recursive: true })
writeFileSync(join(context, 'a.txt'), 'from the context\n')
writeFileSync(join(context, 'src', 'x.js'), 'x')

const template = () =>
  Template({ fileContextPath: context })
    .fromTemplate('base')
    .setEnvs({ COLOUR: 'green' })
    .setWorkdir('/home/user/app')
    .copy('a.txt', 'b.txt')
    .copy('src', '/opt/src')
    .runCmd('test -f b.txt && echo colour is $COLOUR')
    .setStartCmd('python3 -m http.server 8000', waitForPort(8000))

await step('builds', async () => {
  assert.equal(await Template.exists('js-tour'), false)
  const lines = []
  await Template.build(template(), 'js-tour:v1', {
    tags: ['v2'],
    cpuCount: 1,
    memoryMB: 512,
    onBuildLogs: (entry) => lines.push(entry.message),
  })
  assert.ok(lines.includes('colour is green'), lines.join('\n'))
  assert.equal(await Template.exists('js-tour'), true)
})

await step('a sandbox has files and the running command', async () => {
  const sandbox = await Sandbox.create('js-tour:v1')
  assert.equal(await sandbox.files.read('/home/user/app/b.txt'), 'from the context\n')
  assert.equal(await sandbox.files.read('/opt/src/x.js'), 'x')
  const page = await sandbox.commands.run(
    "curl -s -o /dev/null -w '%{http_code}' localhost:8000/b.txt; pwd"
  )
  assert.equal(page.stdout, '200/home/user/app\n')
  await sandbox.kill()
})

await step('a second build is cached', async () => {
  const lines = []
  await Template.build(template(), 'js-tour', {
    onBuildLogs: (entry) => lines.push(entry.message),
  })
  assert.equal(lines.filter((line) => line.includes('(cached)')).length, 3, lines.join('\n'))
})

await step('in the background', async () => {
  const info = await Template.buildInBackground(
    Template().fromTemplate('js-tour').runCmd('echo bg'),
    'js-bg'
  )
  let status
  let logsOffset = 0
  const messages = []
  do {
    status = await Template.getBuildStatus(info, { logsOffset })
    logsOffset += status.logEntries.length
    messages.push(...status.logEntries.map((entry) => entry.message))
    await new Promise((resolve) => setTimeout(resolve, 100))
  } while (status.status === 'building' || status.status === 'waiting')
  assert.equal(status.status, 'ready', JSON.stringify(status.reason))
  assert.ok(messages.includes('bg'))
})

await step('tags', async () => {
  await Template.assignTags('js-tour:v1', ['stable', 'old'])
  await Template.removeTags('js-tour', 'old')
  const found = (await Template.getTags('js-tour')).map((tag) => tag.tag).sort()
  assert.deepEqual(found, ['default', 'stable', 'v1', 'v2'])
})

await step('a failing step', async () => {
  const bad = Template().fromTemplate('base').runCmd('echo why >&2; exit 9')
  await assert.rejects(Template.build(bad, 'js-bad'), (error) => {
    assert.ok(error instanceof BuildError, String(error))
    assert.match(error.message, /exited with code 9/)
    assert.match(error.message, /why/)
    return true
  })
})

await step('from an image', async () => {
  await Template.build(Template().fromImage(image).runCmd('echo hello > ~/hello'), 'js-pulled')
  const sandbox = await Sandbox.create('js-pulled')
  assert.equal(await sandbox.files.read('hello'), 'hello\n')
  await sandbox.kill()
})

console.log(JSON.stringify(results))
