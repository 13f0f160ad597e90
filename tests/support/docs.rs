//! What a test computes and a page says.

use std::fs;
use std::path::Path;

/// Holds the part of a page between `<!-- name -->` and `<!-- /name -->` to `text`. With `ORKPACK_WRITE_DOCS` the page
/// is written instead.
pub fn hold(page: &str, name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(page);
    let said = fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->"));
    let (head, rest) = said.split_once(&begin).unwrap_or_else(|| panic!("{page} has no {begin}"));
    let (_, tail) = rest.split_once(&end).unwrap_or_else(|| panic!("{page} has no {end}"));
    let computed = format!("{head}{begin}{text}{end}{tail}");
    if std::env::var_os("ORKPACK_WRITE_DOCS").is_some() {
        fs::write(&path, computed).unwrap();
    } else {
        assert!(said == computed, "docs/{page}, {name}, is not what is computed:\n{text}");
    }
}
