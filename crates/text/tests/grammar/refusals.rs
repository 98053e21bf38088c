//! What is not enforced is refused, with a pointer.

use serde_json::{Value, json};
use text::{Answer, GrammarFault};

use crate::support::compile;

fn refused(schema: Value, pointer: &str, fault: GrammarFault) {
    match compile(&Answer::Schema(schema.clone())) {
        Ok(_) => panic!("{schema} is taken"),
        Err(error) => {
            assert_eq!((error.pointer.as_str(), error.fault), (pointer, fault), "{schema}: {error}");
            assert!(error.to_string().starts_with(pointer), "{error}");
        }
    }
}

#[test]
fn keywords_that_are_not_enforced() {
    use GrammarFault::Unsupported;
    for (keyword, value) in [
        ("not", json!({"type": "null"})),
        ("if", json!({})),
        ("dependentRequired", json!({})),
        ("dependencies", json!({})),
        ("contains", json!(true)),
        ("uniqueItems", json!(true)),
        ("patternProperties", json!({})),
        ("propertyNames", json!({})),
        ("minProperties", json!(1)),
        ("maxProperties", json!(3)),
        ("unevaluatedProperties", json!(false)),
        ("multipleOf", json!(2)),
        ("additionalItems", json!(false)),
        ("$dynamicRef", json!("#a")),
    ] {
        refused(
            json!({"properties": {"a/b": {keyword: value}}}),
            &format!("/properties/a~1b/{keyword}"),
            Unsupported,
        );
    }
    for idle in [json!({"uniqueItems": false}), json!({"minProperties": 0}), json!({"$id": "x", "then": {}})]
    {
        compile(&Answer::Schema(idle)).unwrap();
    }
}

#[test]
fn values_that_are_not_enforced() {
    use GrammarFault::Unsupported;
    for (schema, pointer) in [
        (json!({"format": "hostname"}), "/format"),
        (json!({"items": [{"type": "null"}]}), "/items"),
        (json!({"$ref": "https://example.com/a"}), "/$ref"),
        (json!({"$ref": "#anchor"}), "/$ref"),
        (json!({"items": {"$id": "b"}}), "/items/$id"),
        (json!({"pattern": "(?=a)b"}), "/pattern"),
        (json!({"pattern": "(a)\\1"}), "/pattern"),
        (json!({"pattern": "\\bword\\b"}), "/pattern"),
        (json!({"pattern": "a^b"}), "/pattern"),
        (json!({"pattern": "(?i)a"}), "/pattern"),
        (json!({"pattern": "[[a]b]"}), "/pattern"),
        (json!({"minLength": 1 << 21}), "/minLength"),
        (json!({"maxItems": 1 << 17}), "/maxItems"),
        (json!({"minimum": 1e16}), "/minimum"),
        (json!({"const": u64::MAX}), "/const"),
        (json!({"enum": ["a", {"b": "\u{1}"}]}), "/enum/1/b"),
        (json!({"properties": {"\u{7f}": true}}), "/properties/\u{7f}"),
        (json!({"oneOf": [{"type": "string"}, {"const": "a"}]}), "/oneOf/1"),
        (
            json!({"oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]}),
            "/oneOf/1",
        ),
        (json!({"oneOf": [{"minimum": 0}, {"maximum": 0}]}), "/oneOf/1"),
        (json!(false), ""),
        (json!({"$ref": "#"}), ""),
        (json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}), ""),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), ""),
        (json!({"allOf": [{"type": "string"}, {"type": "null"}]}), ""),
    ] {
        refused(schema, pointer, Unsupported);
    }
}

#[test]
fn what_is_no_schema() {
    use GrammarFault::Invalid;
    for (schema, pointer) in [
        (json!(7), ""),
        (json!({"items": 7}), "/items"),
        (json!({"type": "text"}), "/type"),
        (json!({"type": []}), "/type"),
        (json!({"properties": []}), "/properties"),
        (json!({"required": "a"}), "/required"),
        (json!({"anyOf": []}), "/anyOf"),
        (json!({"enum": []}), "/enum"),
        (json!({"minLength": -1}), "/minLength"),
        (json!({"minimum": "1"}), "/minimum"),
        (json!({"exclusiveMinimum": true}), "/exclusiveMinimum"),
        (json!({"pattern": 1}), "/pattern"),
        (json!({"pattern": "[a"}), "/pattern"),
        (json!({"pattern": "a{2,1}"}), "/pattern"),
        (json!({"$ref": "#/nowhere"}), "/$ref"),
        (json!({"$ref": 1}), "/$ref"),
    ] {
        refused(schema, pointer, Invalid);
    }
    assert_eq!(compile(&Answer::Regex("(a".into())).unwrap_err().fault, Invalid);
    assert_eq!(compile(&Answer::Choice(vec![])).unwrap_err().fault, Invalid);
    let empty = compile(&Answer::Choice(vec!["a".into(), String::new()])).unwrap_err();
    assert_eq!((empty.index, empty.to_string().as_str()), (Some(1), "[1]: a choice must not be empty"));
}
