#include "tilestone/storage/s3/answers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tilestone/base/error_testing.h"

namespace tilestone::s3 {
namespace answers_test {

using testing::ElementsAre;

TEST(Answers, RefusalsOfS3AndOfSts) {
  Refusal refusal = parse_refusal(
      "<?xml version=\"1.0\"?>\n<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong "
      "&amp; old</Message><Region>eu-west-1</Region><RequestId>R</RequestId></Error>");
  EXPECT_EQ(refusal.code, "AuthorizationHeaderMalformed");
  EXPECT_EQ(refusal.message, "wrong & old");
  EXPECT_EQ(refusal.region, "eu-west-1");
  EXPECT_EQ(refusal.request_id, "R");
  refusal = parse_refusal(
      "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><Error><Code>Expired"
      "</Code></Error><RequestId>S</RequestId></ErrorResponse>");
  EXPECT_EQ(refusal.code, "Expired");
  EXPECT_EQ(refusal.request_id, "S");
  for (const char* const text : {"", "no XML", "<Error><Code>Cut", "<html><body/></html>"}) {
    EXPECT_EQ(parse_refusal(text).code, "") << text;
  }
}

TEST(Answers, ListsAreDecodedIfTheServerHasEncodedThem) {
  const std::string objects =
      "<Contents><Key>a+b%2Bc</Key><Size>12</Size><ETag>&quot;e&quot;</ETag></Contents>"
      "<CommonPrefixes><Prefix>p%20/</Prefix></CommonPrefixes></ListBucketResult>";
  ListPage page = parse_list("<ListBucketResult><EncodingType>url</EncodingType>" + objects);
  EXPECT_THAT(page.objects, ElementsAre(Listed{"a b+c", 12, "\"e\""}));
  EXPECT_THAT(page.prefixes, ElementsAre("p /"));
  EXPECT_EQ(page.next, "");
  page = parse_list(
      "<ListBucketResult><IsTruncated>true</IsTruncated>"
      "<NextContinuationToken>t</NextContinuationToken>" +
      objects);
  EXPECT_EQ(page.objects[0].key, "a+b%2Bc");
  EXPECT_EQ(page.next, "t");
}

TEST(Answers, SpacesOfKeysStay) {
  const ListPage page = parse_list(
      "<x:ListBucketResult xmlns:x=\"u\"><x:Contents><x:Key> a </x:Key><x:Size>0</x:Size>"
      "</x:Contents><x:Contents><x:Key> </x:Key><x:Size>0</x:Size></x:Contents>"
      "</x:ListBucketResult>");
  EXPECT_THAT(page.objects, ElementsAre(Listed{" a ", 0, ""}, Listed{" ", 0, ""}));
}

TEST(Answers, DocumentsThatAreNotWholeAreErrors) {
  for (const char* const xml :
       {"", "<ListBucketResult><Contents>", "<Other/>",
        "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        "<ListBucketResult><Contents><Key>k</Key></Contents></ListBucketResult>",
        "<ListBucketResult><Contents><Size>99999999999999999999</Size></Contents>"
        "</ListBucketResult>"}) {
    EXPECT_EQ(error_of([&] { parse_list(xml); }).code(), ErrorCode::kCorrupt) << xml;
  }
  EXPECT_EQ(error_of([] { parse_upload_id("<InitiateMultipartUploadResult/>"); }).code(),
            ErrorCode::kCorrupt);
}

TEST(Answers, Uploads) {
  UploadPage page = parse_uploads(
      "<ListMultipartUploadsResult><NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u"
      "</NextUploadIdMarker><IsTruncated>true</IsTruncated><Upload><Key>k</Key><UploadId>u"
      "</UploadId></Upload></ListMultipartUploadsResult>");
  EXPECT_THAT(page.uploads, ElementsAre(Upload{"k", "u"}));
  EXPECT_EQ(page.next, (Upload{"k", "u"}));
}

TEST(Answers, ListsThatDoNotSayWhatFollowsAreErrors) {
  EXPECT_EQ(error_of([] {
              parse_uploads(
                  "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
                  "</ListMultipartUploadsResult>");
            }).code(),
            ErrorCode::kCorrupt);
}

TEST(Answers, MessagesAreCut) {
  std::string message(499, 'a');
  for (int i = 0; i < 1000; ++i) message += "\xc3\xa9";
  const std::string xml = "<Error><Code>C</Code><Message>" + message + "</Message></Error>";
  EXPECT_EQ(parse_refusal(xml).message, std::string(499, 'a'));
}

TEST(Answers, CompletionMayBeARefusal) {
  EXPECT_EQ(
      parse_made("<CopyObjectResult><ETag>\"e\"</ETag></CopyObjectResult>", "CopyObjectResult"),
      "\"e\"");
  EXPECT_EQ(parse_made("<Error><Code>InternalError</Code></Error>", "CopyObjectResult"),
            std::nullopt);
  EXPECT_EQ(parse_made("<CopyObjectResult/>", "CopyObjectResult"), "");
  EXPECT_EQ(error_of([] { parse_made("<Made/>", "CopyObjectResult"); }).code(),
            ErrorCode::kCorrupt);
}

TEST(Answers, DocumentsThatAreSent) {
  EXPECT_EQ(complete_document({{1, "\"a\"", 0xcbf43926u, 9}, {2, "b", {}, 1}}),
            "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Part>"
            "<ChecksumCRC32>y/Q5Jg==</ChecksumCRC32><ETag>\"a\"</ETag><PartNumber>1</PartNumber>"
            "</Part><Part><ETag>b</ETag><PartNumber>2</PartNumber></Part>"
            "</CompleteMultipartUpload>");
  EXPECT_EQ(delete_document({"a&<b>"}),
            "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Quiet>true</Quiet><Object>"
            "<Key>a&amp;&lt;b&gt;</Key></Object></Delete>");
}

}  // namespace answers_test
}  // namespace tilestone::s3
