//! What was once wrong, and what must not drift: the fixtures are what their README says.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::fixture;

/// Every file under `fixtures/` but the README itself, by its path there.
fn files() -> BTreeMap<String, PathBuf> {
    fn walk(folder: &Path, root: &Path, found: &mut BTreeMap<String, PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, root, found);
            } else {
                found.insert(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned(), path);
            }
        }
    }
    let root = fixture("");
    let mut found = BTreeMap::new();
    walk(&root, &root, &mut found);
    found.remove("README.md");
    found
}

#[test]
fn fixtures_are_what_their_readme_says() {
    let readme = fs::read_to_string(fixture("README.md")).unwrap();
    let listed: BTreeMap<&str, &str> = readme
        .lines()
        .filter_map(|line| line.split_once("  "))
        .filter(|(digest, _)| digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit()))
        .map(|(digest, name)| (name, digest))
        .collect();
    let found: BTreeMap<String, String> = files()
        .into_iter()
        .map(|(name, path)| (name, blake3::hash(&fs::read(path).unwrap()).to_hex().to_string()))
        .collect();
    let wrong: Vec<String> = found
        .iter()
        .filter(|(name, digest)| listed.get(name.as_str()) != Some(&digest.as_str()))
        .map(|(name, digest)| format!("{digest}  {name}"))
        .collect();
    assert!(wrong.is_empty(), "not, or otherwise, listed in fixtures/README.md:\n{}", wrong.join("\n"));
    let gone: Vec<&&str> = listed.keys().filter(|name| !found.contains_key(**name)).collect();
    assert!(gone.is_empty(), "listed in fixtures/README.md, but not there: {gone:?}");
}
