//! Expressions for the `format`s of strings. Each matches only texts that every reader of that format takes.

/// Formats with an expression.
pub(super) const NAMES: &str = "date, time, date-time, uuid, email, ipv4, ipv6";

/// Years 0001 to 9999.
const YEAR: &str = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})";
/// Years with a 29th of February.
const LEAP_YEAR: &str = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)";
const MONTH_DAY: &str = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])\
                         |(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
                         |02-(?:0[1-9]|1[0-9]|2[0-8]))";
/// No leap second: it is one only where one was kept.
const TIME: &str = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?\
                    (?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
const UUID: &str = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}";
/// Parts are bounded so that the whole stays below 64 and 254 characters.
const EMAIL: &str = "[A-Za-z0-9_%+-]{1,20}(?:\\.[A-Za-z0-9_%+-]{1,20}){0,2}\
                     @(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?\\.){1,4}[A-Za-z]{2,24}";
const BYTE: &str = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const GROUP: &str = "[0-9a-fA-F]{1,4}";

/// The expression of a format, to match the whole text.
pub(super) fn expression(name: &str) -> Option<String> {
    Some(match name {
        "date" => date(),
        "time" => TIME.to_owned(),
        "date-time" => format!("{}T{TIME}", date()),
        "uuid" => UUID.to_owned(),
        "email" => EMAIL.to_owned(),
        "ipv4" => format!("{BYTE}(?:\\.{BYTE}){{3}}"),
        "ipv6" => ipv6(),
        _ => return None,
    })
}

fn date() -> String {
    format!("(?:{YEAR}-{MONTH_DAY}|{LEAP_YEAR}-02-29)")
}

/// Eight groups, or up to seven with `::` for the zeros.
fn ipv6() -> String {
    let groups = |most: usize| match most {
        0 => String::new(),
        1 => format!("(?:{GROUP})?"),
        most => format!("(?:{GROUP}(?::{GROUP}){{0,{}}})?", most - 1),
    };
    let mut forms = vec![format!("{GROUP}(?::{GROUP}){{7}}"), format!("::{}", groups(7))];
    for left in 1..=7 {
        let before = format!("{GROUP}(?::{GROUP}){{{}}}", left - 1);
        forms.push(format!("{before}::{}", groups(7 - left)));
    }
    format!("(?:{})", forms.join("|"))
}
