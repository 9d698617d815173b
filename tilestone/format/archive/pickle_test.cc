// Tests that pickles are read as values, and that pickles that look like an attack are refused.
#include <gtest/gtest.h>

#include "tilestone/base/error.h"
#include "tilestone/format/archive/pickle_reader_internal.h"
#include "tilestone/format/archive/torch_archive.h"
#include "tilestone/format/archive/value_reader_internal.h"

namespace tilestone::archive::pickle_test {

using namespace std::string_literals;

Value read(const std::string& opcodes) { return read_pickle(as_bytes("\x80\x02"s + opcodes)); }

std::string repr(const std::string& opcodes) { return to_string(read(opcodes)); }

// The code of the error that reading throws; kInternal if there is no error.
ErrorCode refusal(const std::string& opcodes) {
  try {
    read(opcodes);
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("pickle"), std::string::npos) << error.what();
    return error.code();
  }
  return ErrorCode::kInternal;
}

std::string repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Pickle, PlainKindsAreRead) {
  EXPECT_EQ(repr("N."), "None");
  EXPECT_EQ(repr("\x88."), "True");
  EXPECT_EQ(repr("J\xff\xff\xff\xff."), "-1");
  EXPECT_EQ(repr("K\x07."), "7");
  EXPECT_EQ(repr("G\x3f\xf8\0\0\0\0\0\0."s), "1.5");
  EXPECT_EQ(repr("X\x02\0\0\0hi."s), "'hi'");
  EXPECT_EQ(repr("C\x02\x01\xff."s), "b'\\x01\\xff'");
  EXPECT_EQ(repr("(K\x01]K\x02\x61}X\x01\0\0\0aNst."s), "(1, [2], {'a': None})");
}

TEST(Pickle, IntsOfAnyLengthAreRead) {
  EXPECT_EQ(repr("\x8a\x00."s), "0");
  EXPECT_EQ(repr("\x8a\x01\xff."s), "-1");
  EXPECT_EQ(repr("\x8a\x09\0\0\0\0\0\0\0\0\x40."s), "1180591620717411303424");
  EXPECT_EQ(repr("\x8a\x08\0\0\0\0\0\0\0\x80."s), "-9223372036854775808");
  // The number is encoded in more bytes than it needs.
  EXPECT_EQ(read("\x8a\x0a\x05\0\0\0\0\0\0\0\0\0."s).as_int(), 5);
  EXPECT_EQ(read("\x8a\x0a\xfb\xff\xff\xff\xff\xff\xff\xff\xff\xff."s).as_int(), -5);
}

TEST(Pickle, KnownCallsBecomePlainValues) {
  EXPECT_EQ(repr("c_codecs\nencode\nX\x03\0\0\0\x01\xc3\xbfX\x06\0\0\0latin1\x86R."s),
            "b'\\x01\\xff'");
  EXPECT_EQ(read("ctorch\nbfloat16\n.").as_dtype(), DType::kBFloat16);
  EXPECT_EQ(repr("c__builtin__\nbytes\n)R."), "b''");
}

TEST(Pickle, WhatIsNearlyAPlainValueKeepsItsClass) {
  EXPECT_EQ(repr("ctorch\nSize\nK\x02K\x03\x86\x85R."), "torch.Size((2, 3))");
  const Value ordered = read("ccollections\nOrderedDict\n)R(X\x01\0\0\0aK\x01u}X\x01\0\0\0mNsb."s);
  EXPECT_EQ(to_string(ordered), "OrderedDict({'a': 1})");
  EXPECT_TRUE(ordered.is_ordered_dict());
  EXPECT_EQ(to_string(ordered.attributes()), "{'m': None}");
  EXPECT_NE(ordered, Value::dict(ordered.as_dict()));
}

TEST(Pickle, SeveralWaysToSayOneObjectAreOne) {
  const Value plain = read("cm\nC\nK\x01\x85\x81}X\x01\0\0\0aNsb."s);
  const std::string state = "}X\x01\0\0\0aNsb."s;
  EXPECT_EQ(read("ccopy_reg\n__newobj__\ncm\nC\nK\x01\x86R" + state), plain);
  EXPECT_EQ(read("ccopy_reg\n__newobj_ex__\ncm\nC\nK\x01\x85}\x87R" + state), plain);
  EXPECT_EQ(read("cm\nC\nK\x01\x85}\x92" + state), plain);
  EXPECT_EQ(read("ccopy_reg\n_reconstructor\ncm\nC\nc__builtin__\nobject\nN\x87R."),
            read("cm\nC\n)\x81."));
  // getattr(getattr(Outer, "Inner"), "f")(), and the same with the name that protocol 4 uses.
  const Value inner = read(
      "c__builtin__\ngetattr\nq\0h\0cm\nOuter\nX\x05\0\0\0Inner\x86RX\x01\0\0\0f\x86R)R0"
      "h\0cm\nOuter\nX\x05\0\0\0Inner\x86R)R."s);
  EXPECT_EQ(to_string(inner), "m.Outer.Inner()");
  EXPECT_EQ(read_pickle(as_bytes("\x80\x04\x8c\x01m\x8c\x0bOuter.Inner\x93)R."s)), inner);
}

TEST(Pickle, ObjectsKeepKeywordArguments) {
  const std::string keywords = "}X\x01\0\0\0bK\x02s"s;
  const Value value = read("cm\nC\nK\x01\x85" + keywords + "\x92.");
  EXPECT_EQ(to_string(value), "m.C(1, b=2)");
  EXPECT_EQ(value.as_opaque().keywords, (Value::Dict{{Value("b"), Value(2)}}));
  // functools.partial(C.__new__, C, 1, b=2)(), as written in protocol 2.
  const std::string function = "c__builtin__\ngetattr\ncm\nC\nq\0X\x07\0\0\0__new__\x86Rq\1"s;
  EXPECT_EQ(
      read("cfunctools\npartial\n" + function + "\x85R(h\1h\0K\x01\x86"s + keywords + "Ntb)R."),
      value);
  EXPECT_EQ(refusal("cm\nC\n)}K\x01K\x02s\x92."), ErrorCode::kUnsafe);  // the keyword is 1
}

TEST(Pickle, NamesOfPython2AreThoseOfPython3UpToProtocol2) {
  EXPECT_EQ(repr("c__builtin__\nxrange\nK\x01\x85R."), "range(1)");
  EXPECT_EQ(repr("cexceptions\nValueError\n)R."), "ValueError()");
  EXPECT_EQ(repr("cUserList\nUserList\n."), "collections.UserList");
  EXPECT_EQ(repr("ccopy_reg\nf\n."), "copyreg.f");
  EXPECT_EQ(repr("ccommands\nf\n."), "commands.f");  // no name that stands in state dicts
  EXPECT_EQ(to_string(read_pickle(as_bytes("\x80\x03"
                                           "c__builtin__\nxrange\n."))),
            "__builtin__.xrange");
}

TEST(Pickle, TextOfPython2IsRead) {
  EXPECT_EQ(repr("(U\x01xT\x01\0\0\0yU\x01\xfft."s), "('x', 'y', b'\\xff')");
  EXPECT_EQ(refusal("T\xff\xff\xff\xff."), ErrorCode::kCorrupt);
}

TEST(Pickle, ProtocolsWithoutBytesAreRefused) {
  for (const char* old : {"I1\n.", "L1L\n.", "F1.5\n.", "S'a'\n.", "Va\n.", "(d.", "(l.", "Ng0\n.",
                          "Np0\n.", "(i__main__\nC\n.", "(c__main__\nC\no.", "Pa\n."}) {
    EXPECT_EQ(refusal(old), ErrorCode::kUnsupported) << old;
  }
  EXPECT_EQ(refusal("\xff."), ErrorCode::kCorrupt);
}

TEST(Pickle, UnknownCallsAreReportedAndNeverMade) {
  const Value value = read("cposix\nsystem\nX\x02\0\0\0ls\x85R."s);
  const Opaque& call = value.as_opaque();
  EXPECT_EQ(call.kind, Opaque::Kind::kCall);
  EXPECT_EQ(call.module, "posix");
  EXPECT_EQ(call.name, "system");
  EXPECT_EQ(call.args, Value::List{Value("ls")});
}

TEST(Pickle, ObjectsKeepStateItemsAndEntries) {
  const Value value = read("cm\nC\n)\x81K\x05\x61X\x01\0\0\0kNs}X\x01\0\0\0xK\x01sb."s);
  const Opaque& object = value.as_opaque();
  EXPECT_EQ(object.kind, Opaque::Kind::kNew);
  EXPECT_EQ(object.appended, Value::List{Value(5)});
  ASSERT_EQ(object.entries.size(), 1u);
  EXPECT_TRUE(object.has_state);
  EXPECT_EQ(to_string(object.state), "{'x': 1}");
}

TEST(Pickle, BothNamesOfPathlibAreOne) {
  const std::string args = "X\x01\0\0\0a\x85R."s;
  EXPECT_EQ(read("cpathlib\nPosixPath\n" + args), read("cpathlib._local\nPosixPath\n" + args));
}

TEST(Pickle, SharedContainersAreReadOnce) {
  EXPECT_EQ(repr("]q\0K\x07\x61h\0h\0\x87."s), "([7], [7], [7])");
}

// Appends to two lists in turn, so that each list's elements are followed by the other's in the
// arena; then to each list alone, beyond the capacity that it has been moved to. Some elements are
// tuples, whose own elements come between in the arena.
TEST(Pickle, ContainersGrowInBatchesOfAnySize) {
  std::string opcodes = "]q\0]q\1"s;
  Value::List expected[2];
  uint8_t next = 0;
  const auto batch = [&](int list, size_t count, bool tuples) {
    opcodes += {'h', static_cast<char>(list), '('};
    for (size_t i = 0; i < count; ++i, ++next) {
      opcodes += {'K', static_cast<char>(next)};
      Value value(int64_t{next});
      if (tuples && next % 3 == 2) {
        opcodes += '\x85';
        value = Value::tuple({value});
      }
      expected[list].push_back(value);
    }
    opcodes += "e0";
  };
  for (bool tuples : {false, true}) {
    for (size_t count : {1, 4, 0, 2, 9}) {
      batch(0, count, tuples);
      batch(1, count + 1, tuples);
    }
    for (int list : {1, 0}) {
      for (size_t count : {3, 150, 500}) batch(list, count, tuples);
    }
  }
  EXPECT_EQ(read(opcodes + "\x86."),
            Value::tuple({Value::list(expected[0]), Value::list(expected[1])}));
}

TEST(Pickle, TruncationAtEveryLengthIsRefused) {
  const std::string whole =
      "\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0b]q\0(K\x02M\x03\0Neccollections\nOrderedDict\n)R0u."s;
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(read_pickle(as_bytes(whole.substr(0, size))), Error) << size;
  }
}

TEST(Pickle, ItemsOfWhatIsNoContainerAreUnsafe) {
  EXPECT_EQ(refusal("K\x01K\x02K\x03s."), ErrorCode::kUnsafe);   // SETITEM on an int
  EXPECT_EQ(refusal("](K\x02K\x03u."), ErrorCode::kUnsafe);      // SETITEMS on a list
  EXPECT_EQ(refusal("}K\x02\x61."), ErrorCode::kUnsafe);         // APPEND to a dict
  EXPECT_EQ(refusal(")(K\x02\x65."), ErrorCode::kUnsafe);        // APPENDS to a tuple
  EXPECT_EQ(refusal("](K\x02\x90."), ErrorCode::kUnsafe);        // ADDITEMS to a list
  EXPECT_EQ(refusal("}}b."), ErrorCode::kUnsafe);                // BUILD on a dict
  EXPECT_EQ(refusal("cm\nC\n)\x81}b}b."), ErrorCode::kUnsafe);   // BUILD twice
  EXPECT_EQ(refusal("ctorch\nSize\nN}b."), ErrorCode::kUnsafe);  // BUILD on None
}

TEST(Pickle, CallsOfWhatIsNoNameAreUnsafe) {
  EXPECT_EQ(refusal("K\x01)R."), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal("cm\nf\n)R)R."), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal("cm\nf\nNR."), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal("K\x01X\x01\0\0\0a\x93."s), ErrorCode::kUnsafe);
}

TEST(Pickle, DisorderedStacksAreCorrupt) {
  EXPECT_EQ(refusal("."), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("NN."), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("N(."), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("t."), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("N(\x85."), ErrorCode::kCorrupt);  // a tuple of entries below a mark
  EXPECT_EQ(refusal("N.N"), ErrorCode::kCorrupt);      // bytes after the end
  EXPECT_EQ(refusal("}(K\x01u."), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("h\0."s), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("Nr\xff\xff\xff\x7f."), ErrorCode::kCorrupt);  // a memo with 2^31 entries
  EXPECT_EQ(refusal("X\xff\xff\xff\xff."), ErrorCode::kCorrupt);
  EXPECT_EQ(refusal("X\x01\0\0\0\xff."s), ErrorCode::kCorrupt);  // not UTF-8
}

TEST(Pickle, WhatIsOutsideThePickleIsRefused) {
  EXPECT_EQ(refusal("\x82\x01)R."), ErrorCode::kUnsafe);  // a class named by an extension code
  EXPECT_EQ(refusal("\x97."), ErrorCode::kUnsupported);   // an out-of-band buffer
  EXPECT_THROW(read_pickle(as_bytes("\x80\x06N.")), Error);
}

TEST(Pickle, AContainerThatHoldsItselfIsUnsafe) {
  EXPECT_EQ(refusal("]q\0h\0\x61."s), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal("]q\0h\0\x85\x61."s), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal("cm\nC\n)\x81q\0h\0b."s), ErrorCode::kUnsafe);
}

TEST(Pickle, DepthIsBounded) {
  const auto nested = [](size_t depth) {
    return repeated("]", depth) + repeated("\x61", depth - 1) + ".";
  };
  EXPECT_EQ(refusal(nested(kMaxValueDepth + 2)), ErrorCode::kUnsafe);
  EXPECT_EQ(refusal(nested(1'000'000)), ErrorCode::kUnsafe);
  EXPECT_EQ(read(nested(kMaxValueDepth)).items().size(), 1u);
}

TEST(Pickle, SharingCanNotUnfoldWithoutBound) {
  // Each list holds the previous list ten times: 10^60 elements.
  std::string bomb = "(]q\0"s;
  for (int i = 0; i < 60; ++i) {
    bomb += "](" + repeated("h"s + static_cast<char>(i), 10) + "eq" + static_cast<char>(i + 1);
  }
  EXPECT_EQ(refusal(bomb + "t."), ErrorCode::kUnsafe);
  // A long string that occurs many times.
  const std::string text = "X\0\0\x10\0"s + std::string(1u << 20, 'a') + "q\0"s;
  EXPECT_EQ(refusal("](" + text + repeated("h\0"s, 100'000) + "e."), ErrorCode::kUnsafe);
}

TEST(Pickle, NodesStayInProportionToTheInput) {
  const std::string flood = "\x80\x02(" + repeated("]", 100'000) + "t.";
  EXPECT_LE(Pickle::parse(as_bytes(flood)).node_count(), flood.size());
}

}  // namespace tilestone::archive::pickle_test
