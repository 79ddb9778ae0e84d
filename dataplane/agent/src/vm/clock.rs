// SPDX-License-Identifier: Apache-2.0
//! The clock of a virtual machine: it stood still while the machine was saved.

use std::io;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A clock that is off by less than this is left alone: a step hurts more.
const TOLERANCE: Duration = Duration::from_millis(10);
const NANOS_DIGITS: usize = 9;

/// The time of the node, and when it was received.
#[derive(Clone, Copy, Debug)]
pub struct Timestamp {
    since_epoch: Duration,
    received: Instant,
}

impl Timestamp {
    /// Reads an RFC 3339 time with up to nanoseconds.
    pub fn parse(text: &str, received: Instant) -> Option<Self> {
        let since_epoch = parse_rfc3339(text)?;
        Some(Self {
            since_epoch,
            received,
        })
    }

    /// Sets the clock if it is off by more than 10 ms.
    ///
    /// Errors: what the kernel says.
    pub fn apply(&self) -> io::Result<()> {
        let target = self.since_epoch + self.received.elapsed();
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        if now.abs_diff(target) <= TOLERANCE {
            return Ok(());
        }
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(target.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: target.subsec_nanos().into(),
        };
        // SAFETY: clock_settime(2) reads a valid structure.
        if unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Time since 1970 of `2026-12-01T17:21:09.123456789Z`; an offset (`+01:00`) is taken as well.
fn parse_rfc3339(text: &str) -> Option<Duration> {
    let text = text.trim();
    let number = |from: usize, to: usize| -> Option<i64> {
        let digits = text.get(from..to)?;
        let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| digits.parse().ok())?
    };
    let marks = [(4, "-"), (7, "-"), (13, ":"), (16, ":")];
    if marks
        .iter()
        .any(|(at, mark)| text.get(*at..at + 1) != Some(mark))
        || !matches!(text.get(10..11)?, "T" | "t" | " ")
    {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let valid = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !valid {
        return None;
    }
    let rest = text.get(19..)?;
    let zone_at = rest.find(['Z', 'z', '+', '-'])?;
    let (fraction, zone) = rest.split_at(zone_at);
    let nanos = match fraction.strip_prefix('.') {
        None if fraction.is_empty() => 0,
        Some(digits)
            if (1..=NANOS_DIGITS).contains(&digits.len())
                && digits.bytes().all(|byte| byte.is_ascii_digit()) =>
        {
            format!("{digits:0<NANOS_DIGITS$}").parse().ok()?
        }
        _ => return None,
    };
    let seconds = days_since_epoch(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    let seconds = seconds - offset_seconds(zone)?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos))
}

fn offset_seconds(zone: &str) -> Option<i64> {
    if zone.eq_ignore_ascii_case("z") {
        return Some(0);
    }
    let sign = if zone.starts_with('-') { -1 } else { 1 };
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let (hours, minutes): (u8, u8) = (hours.parse().ok()?, minutes.parse().ok()?);
    Some(sign * (i64::from(hours) * 3600 + i64::from(minutes) * 60))
}

/// Days from 1970-01-01 in the Gregorian calendar, counted in years that begin in March, so that
/// the leap day is the last one.
fn days_since_epoch(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let parse = |text: &str| parse_rfc3339(text).map(|t| (t.as_secs(), t.subsec_nanos()));
        assert_eq!(parse("1970-01-01T00:00:00Z"), Some((0, 0)));
        assert_eq!(parse("2000-02-29T12:00:00Z"), Some((951_825_600, 0)));
        assert_eq!(
            parse("2026-12-01T17:21:09.5Z"),
            Some((1_796_145_669, 500_000_000))
        );
        assert_eq!(
            parse("2026-12-01T18:21:09.123456789+01:00"),
            Some((1_796_145_669, 123_456_789))
        );
        assert_eq!(parse("2026-12-01T16:51:09-00:30"), Some((1_796_145_669, 0)));
        for bad in [
            "",
            "2026-12-01",
            "2026-12-01T17:21:09",
            "2026-13-01T17:21:09Z",
            "2026-12-01T25:21:09Z",
            "2026-12-01T17:21:09.Z",
            "2026-12-01T17:21:09.1234567890Z",
            "1969-12-31T23:59:59Z",
            "+026-12-01T17:21:09Z",
            "ä026-12-01T17:21:09Z",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_right_clock_is_left_alone() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let stamp = Timestamp {
            since_epoch: now,
            received: Instant::now(),
        };
        // Setting it would fail or do harm here.
        stamp.apply().unwrap();
    }
}
