//! Which device is here: the one that was named, or what the board says of itself.

use std::fs;

use super::profile;
use crate::error::Error;
use crate::runtime::Here;

/// Where Linux keeps the names that a board is compatible with, each ended by a zero.
const COMPATIBLE: &str = "/proc/device-tree/compatible";

/// The device named by `--profile`, or that of the board; `None` on other machines.
pub fn here(named: Option<&str>) -> Result<Option<Here>, Error> {
    if let Some(name) = named {
        return Ok(Some(Here { device: profile(name)?.name, is_named: true }));
    }
    let chip = fs::read(COMPATIBLE).ok().and_then(|names| chip(&names));
    Ok(chip.map(|device| Here { device, is_named: false }))
}

/// `rk3588` of `rockchip,rk3588s`: variants of a chip have its NPU.
fn chip(names: &[u8]) -> Option<String> {
    let number = |name: &[u8]| {
        let rest = std::str::from_utf8(name).ok()?.strip_prefix("rockchip,rk")?;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        (digits.len() == 4).then(|| format!("rk{digits}"))
    };
    names.split(|byte| *byte == 0).find_map(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_names_its_chip() {
        let cases: [(&[u8], Option<&str>); 5] = [
            (b"radxa,rock-5b\0rockchip,rk3588\0", Some("rk3588")),
            (b"vendor,board\0rockchip,rk3588s\0", Some("rk3588")),
            (b"rockchip,rk3576-evb1-v10\0rockchip,rk3576\0", Some("rk3576")),
            (b"rockchip,rk-board\0other,rk3588\0", None),
            (b"\xff\0", None),
        ];
        for (names, expected) in cases {
            assert_eq!(chip(names).as_deref(), expected);
        }
    }
}
