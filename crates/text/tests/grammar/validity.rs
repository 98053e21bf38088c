//! A plain reading of JSON Schema, to judge replies by: nothing is shared with what made them.

use regex::Regex;
use serde_json::{Map, Value};

/// Why a value is not valid, or nothing.
pub(crate) fn fault(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let map = match schema {
        Value::Object(map) => map,
        schema => return (schema != true).then(|| format!("{value}: schema is false")),
    };
    let faults = [
        typed(map, value),
        listed(map, value),
        combined(root, map, value),
        number(map, value),
        string(map, value),
        array(root, map, value),
        object(root, map, value),
    ];
    faults.into_iter().flatten().next()
}

fn is_type(name: &str, value: &Value) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => panic!("{name} is no type"),
    }
}

fn typed(map: &Map<String, Value>, value: &Value) -> Option<String> {
    let fits = match map.get("type")? {
        Value::String(name) => is_type(name, value),
        names => names.as_array().unwrap().iter().any(|name| is_type(name.as_str().unwrap(), value)),
    };
    (!fits).then(|| format!("{value} is not of type {}", map["type"]))
}

fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn listed(map: &Map<String, Value>, value: &Value) -> Option<String> {
    if map.get("const").is_some_and(|wanted| !same(wanted, value)) {
        return Some(format!("{value} is not {}", map["const"]));
    }
    let list = map.get("enum")?.as_array().unwrap();
    (!list.iter().any(|wanted| same(wanted, value))).then(|| format!("{value} is not one of {}", map["enum"]))
}

fn combined(root: &Value, map: &Map<String, Value>, value: &Value) -> Option<String> {
    let valid = |key: &str| {
        let parts = map.get(key)?.as_array().unwrap();
        Some((parts.len(), parts.iter().filter(|part| fault(root, part, value).is_none()).count()))
    };
    if valid("allOf").is_some_and(|(all, valid)| valid != all) {
        return Some(format!("{value} misses a part of allOf"));
    }
    if valid("anyOf").is_some_and(|(_, valid)| valid == 0) {
        return Some(format!("{value} fits no part of anyOf"));
    }
    if let Some((_, count)) = valid("oneOf").filter(|(_, count)| *count != 1) {
        return Some(format!("{value} fits {count} parts of oneOf"));
    }
    let target = map.get("$ref")?.as_str().unwrap().strip_prefix('#').unwrap();
    fault(root, root.pointer(target).unwrap(), value)
}

fn number(map: &Map<String, Value>, value: &Value) -> Option<String> {
    let number = value.as_f64().filter(|_| value.is_number())?;
    let bound = |key: &str| map.get(key).and_then(Value::as_f64);
    let fits = bound("minimum").is_none_or(|bound| number >= bound)
        && bound("maximum").is_none_or(|bound| number <= bound)
        && bound("exclusiveMinimum").is_none_or(|bound| number > bound)
        && bound("exclusiveMaximum").is_none_or(|bound| number < bound);
    (!fits).then(|| format!("{number} is out of bounds"))
}

fn string(map: &Map<String, Value>, value: &Value) -> Option<String> {
    let text = value.as_str()?;
    let letters = text.chars().count() as u64;
    let bound = |key: &str| map.get(key).and_then(Value::as_u64);
    if bound("minLength").is_some_and(|least| letters < least)
        || bound("maxLength").is_some_and(|most| letters > most)
    {
        return Some(format!("{text:?} has {letters} letters"));
    }
    if let Some(pattern) = map.get("pattern").and_then(Value::as_str)
        && !Regex::new(&pattern.replace("\\d", "[0-9]").replace("\\w", "[0-9A-Za-z_]"))
            .unwrap()
            .is_match(text)
    {
        return Some(format!("{text:?} does not match {pattern}"));
    }
    let fits = match map.get("format")?.as_str().unwrap() {
        "date" => is_date(text),
        "time" => is_time(text),
        "date-time" => text.split_once('T').is_some_and(|(date, time)| is_date(date) && is_time(time)),
        "uuid" => {
            let parts: Vec<&str> = text.split('-').collect();
            parts.iter().map(|part| part.len()).eq([8, 4, 4, 4, 12])
                && parts.concat().bytes().all(|byte| byte.is_ascii_hexdigit())
        }
        "email" => text.split_once('@').is_some_and(|(name, host)| {
            let is_sound = |part: &str, letters: &str| {
                !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || letters.contains(c))
            };
            (1..=64).contains(&name.len())
                && name.split('.').all(|part| is_sound(part, "_%+-"))
                && host.len() <= 253
                && host.split('.').all(|part| is_sound(part, "-") && part.len() <= 63)
        }),
        "ipv4" => text.parse::<std::net::Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<std::net::Ipv6Addr>().is_ok(),
        format => panic!("{format} is not judged here"),
    };
    (!fits).then(|| format!("{text:?} is no {}", map["format"]))
}

fn is_date(text: &str) -> bool {
    let parts: Vec<u32> = text.split('-').filter_map(|part| part.parse().ok()).collect();
    let [year, month, day] = parts[..] else { return false };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + u32::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    text.len() == 10 && year > 0 && (1..=12).contains(&month) && (1..=days).contains(&day)
}

fn is_time(text: &str) -> bool {
    let (time, zone) = match text.strip_suffix('Z') {
        Some(time) => (time, "00:00"),
        None => match text.rfind(['+', '-']) {
            Some(at) => (&text[..at], &text[at + 1..]),
            None => return false,
        },
    };
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let below = |text: &str, limits: &[u32]| {
        let parts: Vec<&str> = text.split(':').collect();
        parts.len() == limits.len()
            && parts
                .iter()
                .zip(limits)
                .all(|(part, limit)| part.len() == 2 && part.parse::<u32>().is_ok_and(|part| part < *limit))
    };
    below(time, &[24, 60, 60])
        && below(zone, &[24, 60])
        && !fraction.is_empty()
        && fraction.bytes().all(|byte| byte.is_ascii_digit())
}

fn array(root: &Value, map: &Map<String, Value>, value: &Value) -> Option<String> {
    let items = value.as_array()?;
    let bound = |key: &str| map.get(key).and_then(Value::as_u64);
    let length = items.len() as u64;
    if bound("minItems").is_some_and(|least| length < least)
        || bound("maxItems").is_some_and(|most| length > most)
    {
        return Some(format!("{length} items"));
    }
    let prefix = map.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    items.iter().enumerate().find_map(|(index, item)| {
        let schema = prefix.get(index).or_else(|| map.get("items"))?;
        fault(root, schema, item)
    })
}

fn object(root: &Value, map: &Map<String, Value>, value: &Value) -> Option<String> {
    let members = value.as_object()?;
    for name in map.get("required").and_then(Value::as_array).into_iter().flatten() {
        if !members.contains_key(name.as_str().unwrap()) {
            return Some(format!("{name} is missing"));
        }
    }
    members.iter().find_map(|(name, value)| {
        let property = map.get("properties").and_then(|properties| properties.get(name));
        fault(root, property.or_else(|| map.get("additionalProperties"))?, value)
    })
}
