// SPDX-License-Identifier: Apache-2.0
//! Proto3 JSON mapping where it differs from plain serde
//! (<https://protobuf.dev/programming-guides/json/>): bytes are base64 in either alphabet, with or
//! without padding; integers may come as strings; enums come as names or numbers; null is default.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde::{Deserialize, Deserializer};

const CONFIG: GeneralPurposeConfig =
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, CONFIG);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, CONFIG);

/// Base64 as proto3 JSON writes it.
pub fn encode_bytes(data: &[u8], out: &mut String) {
    STANDARD.encode_string(data, out);
}

/// Decodes a `bytes` field.
pub fn decode_bytes(text: &str) -> Result<Vec<u8>, base64::DecodeError> {
    if text.bytes().any(|b| b == b'-' || b == b'_') {
        URL_SAFE.decode(text)
    } else {
        STANDARD.decode(text)
    }
}

/// For `#[serde(deserialize_with)]` on an optional `bytes` field.
pub fn opt_bytes<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Vec<u8>>, D::Error> {
    let text: Option<String> = Option::deserialize(d)?;
    text.map(|t| decode_bytes(&t).map_err(serde::de::Error::custom))
        .transpose()
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(f64),
    Text(String),
}

/// For `#[serde(deserialize_with)]` on an optional `uint32` field.
pub fn opt_u32<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let bad = || serde::de::Error::custom("expected an unsigned 32-bit integer");
    match Option::<NumberOrText>::deserialize(d)? {
        None => Ok(None),
        Some(NumberOrText::Text(text)) => text.trim().parse().map(Some).map_err(|_| bad()),
        Some(NumberOrText::Number(number)) => {
            if number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number) {
                // The range is checked on the line above.
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                Ok(Some(number as u32))
            } else {
                Err(bad())
            }
        }
    }
}

/// For `#[serde(deserialize_with)]` on a field where null means the default.
pub fn or_default<'de, D, T>(d: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(d)?.unwrap_or_default())
}

/// A `google.protobuf.Timestamp`: RFC 3339, UTC, 0, 3, 6 or 9 digits of fraction.
pub fn timestamp(seconds: i64, nanos: u32) -> String {
    let days = seconds.div_euclid(86_400);
    let in_day = seconds.rem_euclid(86_400);
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let mut text = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    if nanos != 0 {
        let digits = format!("{nanos:09}");
        let keep = if nanos.is_multiple_of(1_000_000) {
            3
        } else if nanos.is_multiple_of(1000) {
            6
        } else {
            9
        };
        text.push('.');
        text.push_str(&digits[..keep]);
    }
    text.push('Z');
    text
}

/// Gregorian date of a day counted from 1 January 1970. The year is taken to begin in March, so
/// that the leap day is the last one; 400 years have 146,097 days.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn timestamps_use_the_shortest_group_of_digits() {
        assert_eq!(timestamp(0, 0), "1970-01-01T00:00:00Z");
        assert_eq!(
            timestamp(951_782_400, 500_000_000),
            "2000-02-29T00:00:00.500Z"
        );
        assert_eq!(
            timestamp(1_764_597_755, 123_456_789),
            "2025-12-01T14:02:35.123456789Z"
        );
        assert_eq!(timestamp(-1, 1000), "1969-12-31T23:59:59.000001Z");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn dates_agree_with_the_http_date_library(seconds in 0i64..253_402_300_799) {
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds as u64);
            let http = httpdate::fmt_http_date(time);
            let ours = timestamp(seconds, 0);
            prop_assert_eq!(&http[5..7], &ours[8..10]);
            prop_assert_eq!(&http[12..16], &ours[0..4]);
            prop_assert_eq!(&http[17..25], &ours[11..19]);
        }

        #[test]
        fn bytes_come_back(data in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut text = String::new();
            encode_bytes(&data, &mut text);
            prop_assert_eq!(decode_bytes(&text).unwrap(), data.clone());
            let url = text.trim_end_matches('=').replace('+', "-").replace('/', "_");
            prop_assert_eq!(decode_bytes(&url).unwrap(), data);
        }
    }
}
