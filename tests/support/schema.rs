//! A small JSON schema checker: what the schemas under `formats/` use, and no more.
//!
//! A keyword that it does not know is an error, so that no schema says more than is checked.

use serde_json::{Map, Value};

/// Keywords that are words for the reader.
const WORDS: [&str; 5] = ["$schema", "$id", "title", "description", "$defs"];

/// A schema under `formats/`.
pub fn load(name: &str) -> Value {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("formats").join(name);
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap()
}

/// Checks a document; the error says where it does not conform.
pub fn check(schema: &Value, document: &Value) -> Result<(), String> {
    node(schema, schema, document, "$")
}

fn node(root: &Value, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let schema = schema.as_object().ok_or_else(|| format!("{at}: the schema is no object"))?;
    for (keyword, rule) in schema {
        match keyword.as_str() {
            "$ref" => {
                let pointer = rule.as_str().unwrap().trim_start_matches('#');
                let target = root.pointer(pointer).ok_or_else(|| format!("{at}: no {pointer}"))?;
                node(root, target, value, at)?;
            }
            "type" => kind(rule, value, at)?,
            "enum" if !rule.as_array().unwrap().contains(value) => {
                return Err(format!("{at}: {value} is none of {rule}"));
            }
            "minimum" | "maximum" => limit(keyword, rule, value, at)?,
            "minLength" | "maxLength" => length(keyword, rule, value, at)?,
            "minItems" | "maxItems" | "items" => list(root, keyword, rule, value, at)?,
            "properties" | "required" => {}
            "additionalProperties" if rule != &Value::Bool(false) => {
                return Err(format!("{at}: additionalProperties {rule}"));
            }
            "anyOf" => {
                let rules = rule.as_array().unwrap();
                if !rules.iter().any(|rule| node(root, rule, value, at).is_ok()) {
                    return Err(format!("{at}: {value} is none of the alternatives"));
                }
            }
            "enum" | "additionalProperties" => {}
            other if WORDS.contains(&other) => {}
            other => return Err(format!("{at}: unknown keyword {other}")),
        }
    }
    match value {
        Value::Object(object) => members(root, schema, object, at),
        _ => Ok(()),
    }
}

fn members(
    root: &Value,
    schema: &Map<String, Value>,
    object: &Map<String, Value>,
    at: &str,
) -> Result<(), String> {
    let empty = Map::new();
    let properties = schema.get("properties").map_or(&empty, |p| p.as_object().unwrap());
    for name in schema.get("required").into_iter().flat_map(|r| r.as_array().unwrap()) {
        if !object.contains_key(name.as_str().unwrap()) {
            return Err(format!("{at}: {name} is missing"));
        }
    }
    let closed = schema.contains_key("additionalProperties");
    for (name, value) in object {
        match properties.get(name) {
            Some(schema) => node(root, schema, value, &format!("{at}.{name}"))?,
            None if closed => return Err(format!("{at}: `{name}` is not in the schema")),
            None => {}
        }
    }
    Ok(())
}

fn kind(rule: &Value, value: &Value, at: &str) -> Result<(), String> {
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        other => panic!("unknown type {other}"),
    };
    let fits = match rule {
        Value::Array(kinds) => kinds.iter().any(|kind| is(kind.as_str().unwrap())),
        one => is(one.as_str().unwrap()),
    };
    if fits { Ok(()) } else { Err(format!("{at}: {value} is no {rule}")) }
}

fn limit(keyword: &str, rule: &Value, value: &Value, at: &str) -> Result<(), String> {
    let (Some(limit), Some(number)) = (rule.as_f64(), value.as_f64()) else { return Ok(()) };
    let fits = if keyword == "minimum" { number >= limit } else { number <= limit };
    if fits { Ok(()) } else { Err(format!("{at}: {number}, {keyword} {limit}")) }
}

fn length(keyword: &str, rule: &Value, value: &Value, at: &str) -> Result<(), String> {
    let (Some(limit), Some(text)) = (rule.as_u64(), value.as_str()) else { return Ok(()) };
    let n = text.chars().count() as u64;
    let fits = if keyword == "minLength" { n >= limit } else { n <= limit };
    if fits { Ok(()) } else { Err(format!("{at}: {n} characters, {keyword} {limit}")) }
}

fn list(root: &Value, keyword: &str, rule: &Value, value: &Value, at: &str) -> Result<(), String> {
    let Some(items) = value.as_array() else { return Ok(()) };
    match keyword {
        "items" => {
            for (i, item) in items.iter().enumerate() {
                node(root, rule, item, &format!("{at}[{i}]"))?;
            }
            Ok(())
        }
        _ => {
            let (n, limit) = (items.len() as u64, rule.as_u64().unwrap());
            let fits = if keyword == "minItems" { n >= limit } else { n <= limit };
            if fits { Ok(()) } else { Err(format!("{at}: {n} items, {keyword} {limit}")) }
        }
    }
}
