// SPDX-License-Identifier: Apache-2.0
//! Byte ranges (RFC 9110, section 14).

/// What a `Range` header asks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// The whole file: no range, or one that is no byte range and must be ignored.
    Whole,
    /// `length` bytes from `start`; never empty.
    Part {
        /// Offset of the first byte.
        start: u64,
        /// Number of bytes.
        length: u64,
    },
    /// Nothing that can be served: beyond the end, or several ranges at once.
    Unsatisfiable,
}

/// Reads a `Range` header for a file of `size` bytes.
pub fn parse(header: Option<&str>, size: u64) -> Range {
    let Some(spec) = header
        .map(str::trim)
        .and_then(|text| text.strip_prefix("bytes="))
    else {
        return Range::Whole;
    };
    if spec.contains(',') {
        return Range::Unsatisfiable;
    }
    let Some((first, last)) = spec.trim().split_once('-') else {
        return Range::Whole;
    };
    match (number(first), number(last)) {
        // The last so many bytes.
        (None, Some(count)) if first.trim().is_empty() => {
            let length = count.min(size);
            if length == 0 {
                return Range::Unsatisfiable;
            }
            Range::Part {
                start: size - length,
                length,
            }
        }
        (Some(start), None) if last.trim().is_empty() => part(start, u64::MAX, size),
        (Some(start), Some(last)) if start <= last => part(start, last, size),
        _ => Range::Whole,
    }
}

fn part(start: u64, last: u64, size: u64) -> Range {
    if start >= size {
        return Range::Unsatisfiable;
    }
    Range::Part {
        start,
        length: last.min(size - 1) - start + 1,
    }
}

/// Digits only: no sign, as `parse` alone would take. More than 64 bits means "to the end".
fn number(text: &str) -> Option<u64> {
    let text = text.trim();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn forms() {
        let at = |text: &str| parse(Some(text), 10);
        assert_eq!(parse(None, 10), Range::Whole);
        assert_eq!(
            at("bytes=0-3"),
            Range::Part {
                start: 0,
                length: 4
            }
        );
        assert_eq!(
            at("bytes=5-"),
            Range::Part {
                start: 5,
                length: 5
            }
        );
        assert_eq!(
            at("bytes=-3"),
            Range::Part {
                start: 7,
                length: 3
            }
        );
        assert_eq!(
            at("bytes=-30"),
            Range::Part {
                start: 0,
                length: 10
            }
        );
        assert_eq!(
            at("bytes=9-99999999999999999999999"),
            Range::Part {
                start: 9,
                length: 1
            }
        );
        assert_eq!(at("bytes=10-"), Range::Unsatisfiable);
        assert_eq!(at("bytes=-0"), Range::Unsatisfiable);
        assert_eq!(at("bytes=0-1,3-4"), Range::Unsatisfiable);
        assert_eq!(at("bytes=3-1"), Range::Whole);
        assert_eq!(at("bytes=a-b"), Range::Whole);
        assert_eq!(at("bytes=+1-2"), Range::Whole);
        assert_eq!(at("lines=1-2"), Range::Whole);
        assert_eq!(parse(Some("bytes=0-"), 0), Range::Unsatisfiable);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn a_part_lies_within_the_file(header in "bytes=[0-9]{0,20}-[0-9]{0,20}", size in any::<u64>()) {
            if let Range::Part { start, length } = parse(Some(&header), size) {
                prop_assert!(length > 0);
                prop_assert!(start.checked_add(length).is_some_and(|end| end <= size));
            }
        }

        #[test]
        fn any_header_is_survived(header in "\\PC{0,40}", size in any::<u64>()) {
            parse(Some(&header), size);
        }
    }
}
