//! The files under `formats/` are law: what is told twice is compared here.

use std::collections::BTreeMap;

use orkpack::pack::{Pack, layout};
use serde_json::{Map, Value, json};

use super::support::packs::Sample;

fn format_file(name: &str) -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("formats").join(name);
    std::fs::read_to_string(path).unwrap()
}

fn pack_format() -> Value {
    serde_json::from_str(&format_file("orkpack-v1.json")).unwrap()
}

/// A reader of packs that knows nothing but `formats/orkpack-v1.json`.
struct PackReader<'a> {
    format: &'a Value,
    bytes: &'a [u8],
}

impl PackReader<'_> {
    fn take(&mut self, n: usize) -> &[u8] {
        let (head, tail) = self.bytes.split_at(n);
        self.bytes = tail;
        head
    }

    fn number(&mut self, name: &str) -> u64 {
        let size = self.format["encoding"][name]["size"].as_u64().unwrap() as usize;
        self.take(size).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn read(&mut self, name: &str) -> Value {
        let format = self.format;
        let generic = name.strip_suffix('>').and_then(|name| name.split_once('<'));
        match (name, generic) {
            ("u32" | "u64", _) => json!(self.number(name)),
            ("digest", _) => json!(hex(self.take(32))),
            ("string", _) => {
                let len = self.number("u64") as usize;
                json!(String::from_utf8(self.take(len).to_vec()).unwrap())
            }
            (_, Some(("list", element))) => (0..self.number("u64")).map(|_| self.read(element)).collect(),
            (_, Some(("option", value))) => match self.take(1)[0] {
                0 => Value::Null,
                1 => self.read(value),
                tag => panic!("option tag {tag}"),
            },
            _ => match format["records"].get(name) {
                Some(fields) => self.fields(fields),
                None => self.variant(&format["enums"][name]),
            },
        }
    }

    fn fields(&mut self, fields: &Value) -> Value {
        let mut record = Map::new();
        for field in fields.as_array().unwrap() {
            let value = self.read(field["type"].as_str().unwrap());
            record.insert(field["name"].as_str().unwrap().to_owned(), value);
        }
        Value::Object(record)
    }

    fn variant(&mut self, variants: &Value) -> Value {
        let code = self.number("u32");
        let variant = variants.as_array().unwrap().iter().find(|v| v["code"] == json!(code)).unwrap();
        let name = variant["name"].as_str().unwrap();
        match variant.get("fields") {
            Some(fields) => json!({ name: self.fields(fields) }),
            None => json!(name),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The header of a pack by the table of fields; several of one name are reserved.
fn read_header(format: &Value, pack: &[u8]) -> BTreeMap<String, Value> {
    let mut header = BTreeMap::new();
    let mut end = 0;
    for field in format["header"]["fields"].as_array().unwrap() {
        let (offset, size) = (field["offset"].as_u64().unwrap(), field["size"].as_u64().unwrap());
        assert_eq!(offset, end, "fields follow each other");
        end = offset + size;
        let bytes = &pack[offset as usize..end as usize];
        let value = match field["type"].as_str().unwrap() {
            "zero" => {
                assert!(bytes.iter().all(|byte| *byte == 0));
                continue;
            }
            "u32" | "u64" => json!(bytes.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))),
            _ => json!(hex(bytes)),
        };
        header.insert(field["name"].as_str().unwrap().to_owned(), value);
    }
    assert_eq!(end, format["header"]["length"].as_u64().unwrap());
    header
}

#[test]
fn pack_headers_are_as_the_table_says() {
    let format = pack_format();
    let bytes = Sample::default().pack();
    let pack = Pack::from_bytes("", bytes.clone()).unwrap();
    let mut header = read_header(&format, &bytes);
    assert_eq!(header.remove("magic"), Some(format["constants"]["magic"].clone()));
    assert_eq!(header.remove("version"), Some(format["version"].clone()));
    assert_eq!(header.remove("header_digest"), Some(json!(pack.root().to_string())));
    let header: Map<String, Value> = header.into_iter().collect();
    assert_eq!(Value::Object(header), serde_json::to_value(pack.header()).unwrap());
}

#[test]
fn pack_indexes_are_as_the_tables_say() {
    let format = pack_format();
    let bytes = Sample::default().pack();
    let header = read_header(&format, &bytes);
    let number = |name: &str| header[name].as_u64().unwrap() as usize;
    let (offset, len) = (number("index_offset"), number("index_len"));
    let mut reader = PackReader { format: &format, bytes: &bytes[offset..offset + len] };
    let index = reader.read(format["root_record"].as_str().unwrap());
    assert!(reader.bytes.is_empty(), "nothing follows the record");
    let pack = Pack::from_bytes("", bytes).unwrap();
    assert_eq!(index, serde_json::to_value(pack.index()).unwrap());
}

#[test]
fn pack_digests_are_as_the_tables_say() {
    let format = pack_format();
    let bytes = Sample::default().pack();
    let header = read_header(&format, &bytes);
    let keyed = |context: &str, bytes: &[u8]| {
        let context = format["digests"]["contexts"][context].as_str().unwrap();
        json!(hex(&blake3::derive_key(context, bytes)))
    };
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let (offset, len) = (number(&header["index_offset"]), number(&header["index_len"]));
    let index = &bytes[offset..offset + len];
    assert_eq!(keyed("header", &bytes[..4064]), header["header_digest"]);
    assert_eq!(keyed("index", index), header["index_digest"]);
    let index = PackReader { format: &format, bytes: index }.read("Index");
    for section in index["sections"].as_array().unwrap() {
        let (offset, len) = (number(&section["offset"]), number(&section["len"]));
        let digests = section["digests"].as_array().unwrap();
        let part_len = len / digests.len();
        let parts = (0..digests.len()).map(|i| &bytes[offset + i * part_len..][..part_len]);
        assert_eq!(parts.map(|part| keyed("section", part)).collect::<Vec<_>>(), *digests);
    }
}

#[test]
fn pack_constants_are_those_of_the_code() {
    let format = pack_format();
    assert_eq!(format["version"], json!(layout::VERSION));
    assert_eq!(format["features"].as_array().unwrap().len(), layout::FEATURES.count_ones() as usize);
    assert_eq!(
        format["constants"],
        json!({
            "magic": hex(&layout::MAGIC),
            "foreign_magic": hex(&layout::FOREIGN_MAGIC),
            "page": layout::PAGE,
            "index_limit": layout::INDEX_LIMIT,
            "max_k": layout::MAX_K,
            "max_n": layout::MAX_N,
            "tile": layout::TILE,
        })
    );
    assert_eq!(
        format["digests"]["contexts"],
        json!({
            "header": layout::HEADER_CONTEXT,
            "index": layout::INDEX_CONTEXT,
            "section": layout::SECTION_CONTEXT,
        })
    );
}

/// The prose names every record, field and code of the tables.
#[test]
fn pack_prose_and_tables_name_the_same_things() {
    let (format, prose) = (pack_format(), format_file("orkpack-v1.md"));
    let said = |name: &Value| {
        let name = name.as_str().unwrap();
        assert!(prose.contains(&format!("`{name}`")), "the prose does not name `{name}`");
    };
    for fields in format["records"].as_object().unwrap().values() {
        fields.as_array().unwrap().iter().for_each(|field| said(&field["name"]));
    }
    for variants in format["enums"].as_object().unwrap().values() {
        variants.as_array().unwrap().iter().for_each(|variant| said(&variant["name"]));
    }
    for field in format["header"]["fields"].as_array().unwrap() {
        said(&field["name"]);
        let row =
            format!("| {} | {} | `{}`", field["offset"], field["size"], field["name"].as_str().unwrap());
        assert!(prose.contains(&row), "the prose has no row `{row}`");
    }
}
