#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    orkpack_fuzz::imatrix(data);
});
