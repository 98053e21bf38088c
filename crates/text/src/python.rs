//! What templates written for Python's Jinja expect of values: `tojson`, `string`, printing, `strftime_now`.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Deepest value `tojson` writes.
const JSON_DEPTH_MAX: usize = 128;
/// Name under which the time of the rendering stands in the template's context, seconds since 1970 UTC.
pub(crate) const NOW: &str = "__now_seconds";

/// `json.dumps(value, ensure_ascii=False, indent=indent)`: a space after `,` and `:`, keys in their order.
pub(crate) fn tojson(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    args: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => args.get::<Option<Value>>("indent")?,
    };
    let ensure_ascii = args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = args.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = args.get::<Option<Vec<String>>>("separators")?;
    args.assert_all_used()?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(usize::try_from(indent)?.min(16)),
    };
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be a pair")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut writer =
        JsonWriter { out: String::new(), indent, ensure_ascii, sort_keys, comma, colon, depth: 0 };
    writer.value(state, value)?;
    Ok(Value::from(writer.out))
}

struct JsonWriter {
    out: String,
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
    comma: String,
    colon: String,
    depth: usize,
}

impl JsonWriter {
    fn value(&mut self, state: &State, value: &Value) -> Result<(), Error> {
        state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.block('[', ']', items.len(), |writer, index| writer.value(state, &items[index]))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.block('{', '}', keys.len(), |writer, index| {
                    let key = &keys[index];
                    match key.as_str() {
                        Some(text) => writer.string(text),
                        None => writer.string(&scalar(key).unwrap_or_else(|| key.to_string())),
                    }
                    writer.out.push_str(&writer.colon.clone());
                    writer.value(state, &value.get_item(key)?)
                })?;
            }
            kind => {
                let detail = format!("a value of kind {kind} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }

    fn block(
        &mut self,
        open: char,
        close: char,
        items: usize,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.depth == JSON_DEPTH_MAX {
            let detail = format!("values nest deeper than {JSON_DEPTH_MAX}");
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        self.depth += 1;
        self.out.push(open);
        for index in 0..items {
            if index > 0 {
                self.out.push_str(&self.comma.clone());
            }
            self.line_break();
            item(self, index)?;
        }
        self.depth -= 1;
        if items > 0 {
            self.line_break();
        }
        self.out.push(close);
        Ok(())
    }

    fn line_break(&mut self) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * self.depth));
        }
    }

    fn string(&mut self, text: &str) {
        use std::fmt::Write;
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        write!(self.out, "\\u{unit:04x}").expect("writing to a string cannot fail");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's `str()` of values whose text differs from minijinja's; `None` for all others.
pub(crate) fn scalar(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::None => Some("None".to_owned()),
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::Number => Some(number(value)),
        _ => None,
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// Python's `repr` of a float: shortest digits, an exponent below 1e-4 and from 1e16.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("the format writes an exponent");
    let exponent: i32 = exponent.parse().expect("the format writes an integer exponent");
    if (-4..16).contains(&exponent) {
        let plain = x.to_string();
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// `strftime_now(format)` of transformers, in UTC and with the time the caller gave.
pub(crate) fn strftime_now(state: &State, format: &str) -> Result<String, Error> {
    let now = state.lookup(NOW).and_then(|now| now.as_i64()).unwrap_or(0);
    strftime(now, format)
}

/// Formats seconds since 1970 (UTC) by the common directives of `strftime`.
fn strftime(seconds: i64, format: &str) -> Result<String, Error> {
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (day, second) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    let (year, month, date) = civil(day);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let weekday = DAYS[day.rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = match chars.next() {
            Some('-') => chars.next().map(|c| (c, false)),
            other => other.map(|c| (c, true)),
        };
        let (letter, padded) = directive.unwrap_or(('%', true));
        let two = |n: i64| if padded { format!("{n:02}") } else { n.to_string() };
        let text = match letter {
            'Y' => year.to_string(),
            'y' => two(year.rem_euclid(100)),
            'm' => two(month),
            'd' => two(date),
            'H' => two(hour),
            'I' => two((hour + 11) % 12 + 1),
            'M' => two(minute),
            'S' => two(second % 60),
            'j' => format!("{:03}", day - days_to(year) + 1),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'B' => month_name.to_owned(),
            'b' => month_name[..3].to_owned(),
            'F' => format!("{year}-{month:02}-{date:02}"),
            'T' => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => {
                let detail = format!("strftime_now does not know %{other}");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        };
        out.push_str(&text);
    }
    Ok(out)
}

/// Days from 1970-01-01 to January 1st of a year.
fn days_to(year: i64) -> i64 {
    let before = year - 1;
    before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 719_162
}

/// Year, month and day of a day number counted from 1970-01-01.
fn civil(day: i64) -> (i64, i64, i64) {
    // 400 years have 146097 days, so this guess is at most one year off either way.
    let mut year = 1970 + (day * 400).div_euclid(146_097);
    while days_to(year) > day {
        year -= 1;
    }
    while days_to(year + 1) <= day {
        year += 1;
    }
    let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
    let mut rest = day - days_to(year);
    for (month, length) in (1..).zip([31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]) {
        if rest < length {
            return (year, month, rest + 1);
        }
        rest -= length;
    }
    unreachable!("the days of a year are those of its months")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_writes_them() {
        for (x, text) in [
            (5.0, "5.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (-0.0, "-0.0"),
            (1.2345e300, "1.2345e+300"),
        ] {
            assert_eq!(float(x), text);
        }
    }

    #[test]
    fn times() {
        let check = |seconds: i64, format: &str, wanted: &str| {
            assert_eq!(strftime(seconds, format).unwrap(), wanted);
        };
        check(0, "%Y-%m-%d %A %H:%M:%S", "1970-01-01 Thursday 00:00:00");
        check(1_709_208_000, "%d %B %Y %I:%M %p %j", "29 February 2024 12:00 PM 060");
        check(1_767_225_599, "%-d %b %y %a %F %T", "31 Dec 25 Wed 2025-12-31 23:59:59");
        check(-1, "%F", "1969-12-31");
        assert!(strftime(0, "%Q").is_err());
    }
}
