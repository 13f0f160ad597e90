//! The rooms of the house: every `use crate::` of the library is an arrow of docs/architecture.md, and the
//! constructs that the house forbids are not there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Module → what it may import, from the table in docs/architecture.md.
fn table() -> BTreeMap<String, BTreeSet<String>> {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let rows = text.lines().filter_map(|line| {
        let cells: Vec<&str> = line.trim().trim_matches('|').split(" | ").map(str::trim).collect();
        let [module, _, imports] = cells[..] else { return None };
        let module = module.strip_prefix('`')?.strip_suffix('`')?;
        Some((module.to_owned(), imports.to_owned()))
    });
    let rows: Vec<(String, String)> = rows.collect();
    let all: BTreeSet<String> = rows.iter().map(|(module, _)| module.clone()).collect();
    let parse = |imports: &str| match imports.strip_prefix("any but ") {
        Some(but) => {
            let but: BTreeSet<String> = but.split(", ").map(|m| m.trim_matches('`').to_owned()).collect();
            all.difference(&but).cloned().collect()
        }
        None => imports.split(", ").filter(|m| *m != "—").map(str::to_owned).collect(),
    };
    rows.iter().map(|(module, imports)| (module.clone(), parse(imports))).collect()
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every source file of the library with the module it belongs to.
fn sources() -> Vec<(String, PathBuf, String)> {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    let src = root().join("src");
    let mut files = Vec::new();
    walk(&src, &mut files);
    files.sort();
    files
        .into_iter()
        .filter(|file| !file.starts_with(src.join("bin")) && *file != src.join("lib.rs"))
        .map(|file| {
            let first = file.strip_prefix(&src).unwrap().components().next().unwrap();
            let module = first.as_os_str().to_str().unwrap().trim_end_matches(".rs").to_owned();
            let text = fs::read_to_string(&file).unwrap();
            (module, file, text)
        })
        .collect()
}

/// The part of a file that is not its unit tests, without comments.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]").next().unwrap();
    code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The modules that `crate::…` names in this code.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let name = |text: &str| -> String {
            text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
        };
        match rest.strip_prefix('{') {
            Some(group) => {
                let mut depth = 0;
                let mut start = true;
                for (i, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => start = true,
                        c if start && !c.is_whitespace() => {
                            found.insert(name(&group[i..]));
                            start = false;
                        }
                        _ => {}
                    }
                }
            }
            None => {
                found.insert(name(rest));
            }
        }
    }
    found
}

#[test]
fn every_module_stands_in_the_table_and_imports_only_what_it_may() {
    let table = table();
    let modules: BTreeSet<String> = sources().iter().map(|(module, ..)| module.clone()).collect();
    let listed: BTreeSet<String> = table.keys().cloned().collect();
    assert_eq!(modules, listed, "modules of src/ (left) and rows of docs/architecture.md (right)");
    let mut wrong = Vec::new();
    for (module, file, text) in sources() {
        for import in imports(&code(&text)) {
            if import != module && !table[&module].contains(&import) {
                wrong.push(format!("{}: crate::{import}", file.strip_prefix(root()).unwrap().display()));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that are not in docs/architecture.md:\n{}", wrong.join("\n"));
}

#[test]
fn the_table_has_no_cycles() {
    let mut left = table();
    while !left.is_empty() {
        let done: Vec<String> = left
            .iter()
            .filter(|(_, imports)| imports.iter().all(|i| !left.contains_key(i)))
            .map(|(m, _)| m.clone())
            .collect();
        // `cli` may import itself by "any but"; what remains with only itself is done too.
        let done: Vec<String> =
            if done.is_empty() && left.len() == 1 { left.keys().cloned().collect() } else { done };
        assert!(!done.is_empty(), "a cycle among {:?}", left.keys().collect::<Vec<_>>());
        done.iter().for_each(|module| drop(left.remove(module)));
    }
}

#[test]
fn unsafe_code_lives_only_where_the_style_allows_it() {
    let allowed = |file: &str| {
        ["src/bytes/map.rs", "src/threads/pool.rs"].contains(&file)
            || ["src/kernel/x86_64", "src/kernel/aarch64"].iter().any(|kernel| file.starts_with(kernel))
    };
    for (_, file, text) in sources() {
        let file = file.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        let code = code(&text);
        let uses =
            code.contains("allow(unsafe_code)") || code.contains("unsafe {") || code.contains("unsafe fn");
        assert!(!uses || allowed(&file), "{file} may not use unsafe code");
        let blocks = text.matches("unsafe {").count();
        let reasons = text.matches("SAFETY:").count();
        assert!(blocks <= reasons, "{file}: {blocks} unsafe blocks, {reasons} SAFETY lines");
    }
}

#[test]
fn documents_avoid_what_arbitrary_precision_breaks() {
    for (_, file, text) in sources() {
        for line in text.lines().filter(|line| line.contains("serde(")) {
            for word in ["flatten", "untagged", "tag ="] {
                assert!(!line.contains(word), "{}: `{}` fails on floats here", file.display(), line.trim());
            }
        }
    }
}

#[test]
fn native_endian_reads_and_unfinished_code_are_nowhere() {
    for (_, file, text) in sources() {
        let code = code(&text);
        for word in ["from_ne_bytes", "to_ne_bytes", "todo!(", "unimplemented!(", ".unwrap()", "panic!("] {
            assert!(!code.contains(word), "{} contains {word}", file.display());
        }
    }
}
