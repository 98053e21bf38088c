//! Which vector instructions the fast bodies use. Bits never depend on it.

/// An instruction set this processor has. Values exist only for supported sets, so calling code compiled for
/// one is sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

/// The sets with bodies of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Plain code: the definition.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// The same and VNNI.
    Avx512Vnni,
}

impl Isa {
    /// The best set of this processor.
    pub fn detect() -> Self {
        *Self::supported().last().expect("scalar is always there")
    }

    /// Every set of this processor, plainest first.
    pub fn supported() -> Vec<Self> {
        let mut sets = vec![Self(Kind::Scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                sets.push(Self(Kind::Avx2));
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    sets.push(Self(Kind::Avx512));
                    if has!("avx512vnni") {
                        sets.push(Self(Kind::Avx512Vnni));
                    }
                }
            }
        }
        sets
    }

    /// The set of that name, if this processor has it.
    pub fn named(name: &str) -> Option<Self> {
        Self::supported().into_iter().find(|isa| isa.name() == name)
    }

    /// `scalar`, `avx2`, `avx512` or `avx512-vnni`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Scalar => "scalar",
            Kind::Avx2 => "avx2",
            Kind::Avx512 => "avx512",
            Kind::Avx512Vnni => "avx512-vnni",
        }
    }

    pub(crate) fn kind(self) -> Kind {
        self.0
    }
}

/// Compiles one `#[inline(always)]` body for every instruction set and picks at run time. The body is plain
/// Rust: the compiler may vectorize it, never reassociate or contract it, so all versions give the same bits.
///
/// `by_isa! { pub(crate) fn scale(x: &mut [f32], by: f32) = scale_body }` defines `scale(isa, x, by)`.
macro_rules! by_isa {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path
    ) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                match isa.kind() {
                    $crate::cpu::isa::Kind::Scalar => {}
                    // SAFETY: an `Isa` of this kind exists only where the processor has these features.
                    $crate::cpu::isa::Kind::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    _ => return unsafe { avx512($($arg),*) },
                }
            }
            let _ = isa;
            $body($($arg),*)
        }
    };
}
pub(crate) use by_isa;
