//! Namespaces of a template stay out of all other values.
//!
//! A namespace is the one value of the template engine that can be changed, and so the one that could come
//! to hold itself: printing or comparing it would have no end and take the process along, whatever the fuel.
//! So a name that holds one is used for its attributes alone, or handed whole to a macro, whose parameters
//! are then such names as well. Published templates keep to that; others are refused when they are loaded.

use std::collections::{HashMap, HashSet};

use crate::error::TextError;
use crate::nesting;

/// The function that makes one.
const MAKER: &str = "namespace";

/// A word of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'s> {
    Name(&'s str),
    Sign(u8),
    /// A string, a number, or an operator of two signs.
    Other,
}

/// Refuses a template that uses a namespace as a value.
pub(crate) fn check(source: &str) -> Result<(), TextError> {
    if !source.contains(MAKER) {
        return Ok(());
    }
    let blocks: Vec<_> = nesting::blocks(source).map(|(at, block)| (at, tokens(block.text))).collect();
    let macros = macros(&blocks);
    let mut names: HashSet<&str> = blocks.iter().filter_map(|(_, block)| made(block)).collect();
    loop {
        let mut more = Vec::new();
        for (at, block) in &blocks {
            for place in 0..block.len() {
                let Some(used) = used(block, place, &names, &macros) else { continue };
                let Use::Argument(callee) = used else {
                    return Err(refusal(source, *at, block[place]));
                };
                more.extend(macros[callee].iter().copied().filter(|name| !names.contains(name)));
            }
        }
        if more.is_empty() {
            return Ok(());
        }
        names.extend(more);
    }
}

fn refusal(source: &str, at: usize, token: Token<'_>) -> TextError {
    let name = if let Token::Name(name) = token { name } else { MAKER };
    TextError::TemplateSyntax {
        line: 1 + source.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count(),
        detail: format!(
            "{name} is used as a value; of a namespace only attributes can be, and only \
             {{% set NAME = namespace(...) %}} makes one"
        ),
    }
}

/// How a name that holds a namespace is used, other than for an attribute.
enum Use<'s> {
    /// Whole, as an argument of this macro.
    Argument(&'s str),
    /// As a value.
    Value,
}

/// `None` where the word is no such name, or is used for an attribute.
fn used<'s>(
    block: &[Token<'s>],
    place: usize,
    names: &HashSet<&str>,
    macros: &HashMap<&'s str, Vec<&'s str>>,
) -> Option<Use<'s>> {
    let Token::Name(name) = block[place] else { return None };
    let before = place.checked_sub(1).map(|place| block[place]);
    let after = block.get(place + 1).copied();
    let in_list = matches!(before, Some(Token::Sign(b'(' | b',')));
    let is_key = in_list && after == Some(Token::Sign(b'='));
    if before == Some(Token::Sign(b'.')) || is_key {
        return None;
    }
    if name == MAKER {
        let is_set = place == 3 && made(block).is_some();
        return (!is_set).then_some(Use::Value);
    }
    let is_harmless = matches!(after, Some(Token::Sign(b'.' | b'[') | Token::Name("is")))
        || matches!(before, Some(Token::Name("set" | "for" | "with")));
    if !names.contains(name) || is_harmless {
        return None;
    }
    let (callee, is_definition) = callee(block, place);
    let is_whole =
        matches!(after, Some(Token::Sign(b',' | b')'))) && (in_list || before == Some(Token::Sign(b'=')));
    match callee {
        Some(_) if is_definition => None,
        Some(callee) if is_whole && macros.contains_key(callee) => Some(Use::Argument(callee)),
        _ => Some(Use::Value),
    }
}

/// What the innermost brackets around a word call, and whether they are those of a macro's definition.
fn callee<'s>(block: &[Token<'s>], place: usize) -> (Option<&'s str>, bool) {
    let mut closed = 0_usize;
    for at in (0..place).rev() {
        match block[at] {
            Token::Sign(b')' | b']' | b'}') => closed += 1,
            Token::Sign(b'(' | b'[' | b'{') if closed > 0 => closed -= 1,
            Token::Sign(b'(') => {
                let before = |count: usize| at.checked_sub(count).map(|at| block[at]);
                let Some(Token::Name(name)) = before(1) else { return (None, false) };
                let is_other = matches!(before(2), Some(Token::Sign(b'.' | b'|') | Token::Name("is")));
                let is_definition = before(2) == Some(Token::Name("macro"));
                return ((!is_other).then_some(name), is_definition);
            }
            Token::Sign(b'[' | b'{') => return (None, false),
            _ => {}
        }
    }
    (None, false)
}

/// The name of `set NAME = namespace(...)` and nothing more.
fn made<'s>(block: &[Token<'s>]) -> Option<&'s str> {
    let [Token::Name("set"), Token::Name(name), Token::Sign(b'='), Token::Name(MAKER), rest @ ..] = block
    else {
        return None;
    };
    let mut open = 0_usize;
    for (place, token) in rest.iter().enumerate() {
        match token {
            Token::Sign(b'(' | b'[' | b'{') => open += 1,
            Token::Sign(b')' | b']' | b'}') => open = open.checked_sub(1)?,
            _ => {}
        }
        if open == 0 {
            let is_last = matches!(&rest[place + 1..], [] | [Token::Sign(b'-' | b'+')]);
            return (rest[0] == Token::Sign(b'(') && is_last).then_some(name);
        }
    }
    None
}

/// Parameters of the macros whose names are never anything else.
fn macros<'s>(blocks: &[(usize, Vec<Token<'s>>)]) -> HashMap<&'s str, Vec<&'s str>> {
    let mut macros: HashMap<&str, Vec<&str>> = HashMap::new();
    for (_, block) in blocks {
        if let [Token::Name("macro"), Token::Name(name), rest @ ..] = block.as_slice() {
            let names = rest.iter().filter_map(|token| match token {
                Token::Name(name) => Some(*name),
                _ => None,
            });
            // Names in default values among them: that is only stricter.
            macros.entry(name).or_default().extend(names);
        }
    }
    for (_, block) in blocks {
        for (place, token) in block.iter().enumerate() {
            let is_called = block.get(place + 1) == Some(&Token::Sign(b'('));
            let is_attribute = place > 0 && block[place - 1] == Token::Sign(b'.');
            if let Token::Name(name) = token
                && !is_called
                && !is_attribute
            {
                macros.remove(name);
            }
        }
    }
    macros
}

/// Words of a block, without the signs that trim white space at its beginning.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let bytes = text.as_bytes();
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        at += 1;
        match bytes[start] {
            byte if byte.is_ascii_whitespace() => {}
            quote @ (b'\'' | b'"') => {
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
                tokens.push(Token::Other);
            }
            byte if is_word(byte) => {
                at += bytes[at..].iter().take_while(|byte| is_word(**byte)).count();
                let is_number = byte.is_ascii_digit();
                tokens.push(if is_number { Token::Other } else { Token::Name(&text[start..at]) });
            }
            b'=' | b'!' | b'<' | b'>' if bytes.get(at) == Some(&b'=') => {
                at += 1;
                tokens.push(Token::Other);
            }
            sign => tokens.push(Token::Sign(sign)),
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_used_and_whole_namespaces_handed_on() {
        for source in [
            "{%- set ns = namespace(x=1, y=[namespaced]) -%}{% set ns.x = ns.x + 1 %}{{ ns['y'] }}",
            "{% set ns = namespace(x=1) %}{% if ns is defined %}{{ f(ns=1) }}{% endif %} ns namespace",
            "{% macro m(a, b=2) %}{% set a.x = a.x + 1 %}{% endmacro %}{% set n = namespace(x=1) %}{{ m(n) }}\
             {{ m(1, b=n) }}",
            "{% set ns = namespace() %}{% for ns in [1] %}{% endfor %}{{ 'ns' ~ x.ns }}{# ns #}",
            "{% set ns = namespace(x={'a': ns.y}) %}{% set ns = 3 %}",
            "{{ ns }} {{ [ns] }}",
        ] {
            assert!(check(source).is_ok(), "{source}");
        }
    }

    #[test]
    fn namespaces_inside_of_values_are_refused() {
        for (use_of, line) in [
            ("\n{{ n }}", 2),
            ("{% set n.x = n %}", 1),
            ("\n\n{% set n.x = [n] %}", 3),
            ("{% set n.x = (n) %}", 1),
            ("{% set n.x = {'a': n} %}", 1),
            ("{% set n.x = {'a': {}} | f(n) %}", 1),
            ("{% set n.x = dict(a=n) %}", 1),
            ("{% set n.x = n | list %}", 1),
            ("{% set n.x = [1, n, 2] %}", 1),
            ("{% set m = n %}", 1),
            ("{% set n.x = namespace(y=1) %}", 1),
            ("{% set m = [namespace(y=1)] %}", 1),
            ("{% set m = namespace(y=1), 1 %}", 1),
            ("{% set m = namespace %}", 1),
            ("{% set m = namespace(a=namespace()) %}", 1),
            ("{% macro m(p) %}{% set n.x = [p] %}{% endmacro %}{{ m(n) }}", 1),
            ("{% macro m(p) %}{{ q(p) }}{% endmacro %}{% macro q(r) %}{{ r }}{% endmacro %}{{ m(n) }}", 1),
            ("{% macro m(p) %}{% endmacro %}{% set m = dict %}{% set n.x = m(a=n) %}", 1),
            ("{% macro m(p) %}{% endmacro %}{{ [m((n))] }}", 1),
            ("{% macro m(p) %}{% endmacro %}{{ 1 | m(n) }}", 1),
            ("{{ f(n) }}", 1),
        ] {
            let source = format!("{{% set n = namespace(x=1) %}}{use_of}");
            let refused = check(&source);
            assert!(
                matches!(refused, Err(TextError::TemplateSyntax { line: at, .. }) if at == line),
                "{source}: {refused:?}"
            );
        }
    }
}
