// SPDX-License-Identifier: Apache-2.0
//! Which parts of an archive are wanted: by path, or by patterns as Python's `fnmatch` has them,
//! of which `*` stops at `/`. The server matches the same names when it looks for cached results.

use std::collections::HashMap;

use opendsec_layer::root::clean;
use opendsec_layer::{Error, Kind, Result};

/// Parts of one call: more would fill the memory with their names.
const PARTS_MAX: usize = 1_000_000;

/// What is wanted, and what of it was found so far.
pub struct Sources {
    wanted: Vec<Source>,
    found: HashMap<(usize, Vec<u8>), usize>,
    parts: Vec<Part>,
}

/// Something in the archive that one of the sources means.
pub struct Part {
    /// Which source, by its place.
    source: usize,
    /// Its path in the archive, clean.
    pub path: Vec<u8>,
}

struct Source {
    /// As it was given.
    shown: String,
    /// One for each name on the way; none: the whole archive.
    names: Vec<Vec<u8>>,
}

impl Sources {
    /// Of paths and patterns.
    ///
    /// Errors: `Invalid` for one with `..`.
    pub fn new<'a>(given: impl Iterator<Item = &'a str>) -> Result<Self> {
        let source = |shown: &str| {
            let path = clean(shown.as_bytes())?;
            let names = path.split(|byte| *byte == b'/').map(<[u8]>::to_vec);
            Ok(Source {
                shown: shown.to_owned(),
                names: names.filter(|name| !name.is_empty()).collect(),
            })
        };
        Ok(Self {
            wanted: given.map(source).collect::<Result<_>>()?,
            found: HashMap::new(),
            parts: Vec::new(),
        })
    }

    /// Whether more than one thing goes to the same place.
    pub fn are_several(&self) -> bool {
        self.wanted.len() > 1 || self.parts.len() > 1
    }

    /// The first source of which nothing was found.
    pub fn missing(&self) -> Option<&str> {
        let mut seen = vec![false; self.wanted.len()];
        for part in &self.parts {
            seen[part.source] = true;
        }
        let at = seen.iter().position(|seen| !seen)?;
        Some(&self.wanted[at].shown)
    }

    /// What was found, with the name of the place that [`Self::staged`] gave it: by the order of
    /// the sources, then by that of the archive.
    pub fn parts(&self) -> Vec<(usize, &Part)> {
        let mut all: Vec<_> = self.parts.iter().enumerate().collect();
        all.sort_by_key(|(index, part)| (part.source, *index));
        all
    }

    /// Where a path of the archive goes: a number and what is below it, once for each part that it
    /// belongs to.
    ///
    /// Errors: `Limit` for too many parts.
    pub fn staged(&mut self, path: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut places = Vec::new();
        for index in 0..self.wanted.len() {
            let Some(len) = self.wanted[index].hits(path) else {
                continue;
            };
            let key = (index, path[..len].to_vec());
            let next = self.parts.len();
            let part = *self.found.entry(key).or_insert(next);
            if part == next {
                if next == PARTS_MAX {
                    let what = format!("more than {PARTS_MAX} matches");
                    return Err(Error::new(Kind::Limit, what));
                }
                self.parts.push(Part {
                    source: index,
                    path: path[..len].to_vec(),
                });
            }
            places.push(place(part, &path[len..]));
        }
        Ok(places)
    }

    /// Where a path went, if it is part of what was found already.
    pub fn known(&self, path: &[u8]) -> Vec<Vec<u8>> {
        let hit = |(index, source): (usize, &Source)| {
            let len = source.hits(path)?;
            let part = self.found.get(&(index, path[..len].to_vec()))?;
            Some(place(*part, &path[len..]))
        };
        self.wanted.iter().enumerate().filter_map(hit).collect()
    }
}

impl Source {
    /// How much of a path is what is meant; `None`: it lies elsewhere.
    fn hits(&self, path: &[u8]) -> Option<usize> {
        let mut len = 0;
        for (index, pattern) in self.names.iter().enumerate() {
            let begin = if index == 0 { 0 } else { len + 1 };
            let rest = path.get(begin..).filter(|rest| !rest.is_empty())?;
            let name = rest.split(|byte| *byte == b'/').next()?;
            if !matches(pattern, name) {
                return None;
            }
            len = begin + name.len();
        }
        Some(len)
    }
}

fn place(part: usize, rest: &[u8]) -> Vec<u8> {
    let number = part.to_string().into_bytes();
    match rest.first() {
        None => number,
        Some(b'/') => [&number, rest].concat(),
        Some(_) => [&number, &b"/"[..], rest].concat(),
    }
}

/// Whether a name is one that a pattern means: `*`, `?`, `[a-c]`, `[!a-c]`.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    if pattern == name {
        return true;
    }
    if !pattern.iter().any(|byte| b"*?[".contains(byte)) {
        return false;
    }
    let (pattern, name) = (characters(pattern), characters(name));
    let (mut at, mut seen) = (0, 0);
    // Behind the last star, and how much of the name that star has taken.
    let mut star: Option<(usize, usize)> = None;
    while seen < name.len() {
        if pattern.get(at) == Some(&u32::from(b'*')) {
            at += 1;
            star = Some((at, seen));
            continue;
        }
        if let Some(len) = one(&pattern[at..], name[seen]) {
            at += len;
            seen += 1;
            continue;
        }
        let Some((behind, taken)) = star else {
            return false;
        };
        star = Some((behind, taken + 1));
        (at, seen) = (behind, taken + 1);
    }
    pattern[at..].iter().all(|left| *left == u32::from(b'*'))
}

/// How long the pattern for one character is, if this is one for it.
fn one(pattern: &[u32], character: u32) -> Option<usize> {
    let first = *pattern.first()?;
    if first == u32::from(b'?') {
        return Some(1);
    }
    if first == u32::from(b'[')
        && let Some(len) = set_len(pattern)
    {
        let (is_not, set) = match &pattern[1..len - 1] {
            [mark, rest @ ..] if *mark == u32::from(b'!') => (true, rest),
            set => (false, set),
        };
        return (in_set(set, character) != is_not).then_some(len);
    }
    (first == character).then_some(1)
}

/// Length of a set with its brackets. A bracket that is first in it belongs to it; one that is
/// never closed is a character like others.
fn set_len(pattern: &[u32]) -> Option<usize> {
    let mut at = 1;
    for also in [b'!', b']'] {
        if pattern.get(at) == Some(&u32::from(also)) {
            at += 1;
        }
    }
    let close = |byte: &u32| *byte == u32::from(b']');
    pattern
        .get(at..)?
        .iter()
        .position(close)
        .map(|len| at + len + 1)
}

fn in_set(set: &[u32], character: u32) -> bool {
    let mut rest = set;
    while let [first, more @ ..] = rest {
        match more {
            [dash, last, more @ ..] if *dash == u32::from(b'-') => {
                if (*first..=*last).contains(&character) {
                    return true;
                }
                rest = more;
            }
            _ => {
                if *first == character {
                    return true;
                }
                rest = more;
            }
        }
    }
    false
}

/// Characters of a name; what is no UTF-8 byte by byte, as Python's `surrogateescape` has it.
fn characters(name: &[u8]) -> Vec<u32> {
    let mut all = Vec::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        all.extend(chunk.valid().chars().map(u32::from));
        all.extend(chunk.invalid().iter().map(|byte| 0xdc00 + u32::from(*byte)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_the_server_means() {
        // `server/opendsec_server/control/tests/test_archives.py` has the same table.
        for (pattern, name, expected) in [
            ("*", "a.py", true),
            ("*.py", "a.py", true),
            ("*.py", "a.pyc", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("?", "ü", true),
            ("??", "ü", false),
            ("[a-c]1", "b1", true),
            ("[!a-c]1", "b1", false),
            ("[!a-c]1", "d1", true),
            ("[]]", "]", true),
            ("[!]]", "x", true),
            ("[a", "[a", true),
            ("[a", "a", false),
            ("[z-a]", "m", false),
            ("[a-]", "-", true),
            ("[-a]", "-", true),
            ("[]-a]", "^", true),
            ("[^a]", "^", true),
            ("[[]x", "[x", true),
            ("x[", "x[", true),
            ("*[0-9]", "run7", true),
            ("**", "anything", true),
            ("a?c", "a/c", false),
        ] {
            let mut sources = Sources::new([pattern].into_iter()).unwrap();
            let hit = !sources.staged(name.as_bytes()).unwrap().is_empty();
            assert_eq!(hit, expected, "{pattern} {name}");
        }
        assert!(matches(b"*?", b"\xff"));
        assert!(!matches(b"??", b"\xff"));
    }

    #[test]
    fn long_patterns_end() {
        let pattern = "*a".repeat(1_000);
        assert!(!matches(pattern.as_bytes(), "a".repeat(900).as_bytes()));
        assert!(matches(pattern.as_bytes(), "a".repeat(1_900).as_bytes()));
    }

    #[test]
    fn parts() {
        let mut sources = Sources::new(["src/*", "src/b", "none"].into_iter()).unwrap();
        assert!(sources.staged(b"src").unwrap().is_empty());
        assert_eq!(sources.staged(b"src/a/x").unwrap(), [b"0/x"]);
        assert_eq!(sources.known(b"src/a/y"), [b"0/y"]);
        assert!(sources.known(b"src/c").is_empty());
        assert_eq!(sources.staged(b"src/b").unwrap(), [b"1", b"2"]);
        assert_eq!(sources.staged(b"src/a").unwrap(), [b"0"]);
        assert!(sources.are_several());
        assert_eq!(sources.missing(), Some("none"));
        let paths: Vec<_> = sources
            .parts()
            .iter()
            .map(|(n, part)| (*n, &*part.path))
            .collect();
        assert_eq!(paths, [(0, &b"src/a"[..]), (1, b"src/b"), (2, b"src/b")]);
        let mut whole = Sources::new(["."].into_iter()).unwrap();
        assert_eq!(whole.staged(b"").unwrap(), [b"0"]);
        assert_eq!(whole.staged(b"a/b").unwrap(), [b"0/a/b"]);
        assert!(!whole.are_several());
        assert!(Sources::new(["../x"].into_iter()).is_err());
    }
}
